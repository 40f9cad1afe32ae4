"""The last version whose functions of scores and weights are here beside those of attention."""

__all__ = ["__version__"]
__version__ = "0.17.5"
