"""Hash tables of the extension, which may be named."""

from typing import Any

__all__ = ["HashTable"]


class HashTable:
    """Has no form here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "spconv's HashTable was made, of which fuseport's stand-in has no form: use "
            "torch.unique and torch.searchsorted"
        )
