"""Caches of keys: names that can be imported and derived from."""

from typing import NoReturn

from .._refused import Refused, refuse

__all__ = [
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "refuse_cache",
]


def refuse_cache() -> NoReturn:
    """Raises NotImplementedError."""
    refuse(
        "inference_params",
        "keep keys and values from call to call",
        "export a forward over whole sequences",
    )


class KVCacheManager(Refused):
    """Refuses to be made."""

    _why = "keeps keys and values from call to call"
    _instead = "export a forward over whole sequences"


class InferenceParams(KVCacheManager):
    """Refuses to be made."""


class NonPagedKVCacheManager(KVCacheManager):
    """Refuses to be made."""


class PagedKVCacheManager(KVCacheManager):
    """Refuses to be made."""
