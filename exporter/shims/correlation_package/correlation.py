"""The correlation as a module, where later packages of the name have it."""

from .modules.corr import Correlation

__all__ = ["Correlation"]
