"""How the package was built."""

__all__ = ["CPU_ONLY_BUILD"]

CPU_ONLY_BUILD = False
