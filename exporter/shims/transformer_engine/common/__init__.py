"""What is of no framework: recipes."""

from . import recipe

__all__ = ["recipe"]
