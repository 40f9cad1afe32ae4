"""Python's loggers."""

import logging

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    """The logger of that name."""
    return logging.getLogger(name)
