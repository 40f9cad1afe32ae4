"""What layers leave in tensors for others."""

from enum import Enum
from typing import Any

__all__ = [
    "TensorCache",
    "TensorCacheMode",
    "clear_global_tensor_cache",
    "get_global_tensor_cache",
    "get_tensor_cache_mode",
    "set_global_tensor_cache",
    "set_tensor_cache_mode",
]


class TensorCacheMode(Enum):
    """Whether tensors that are made have one of their own."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class TensorCache:
    """Coordinates by strides, and places by windows."""

    def __init__(self) -> None:
        self.cmaps: dict[Any, Any] = {}
        self.kmaps: dict[Any, Any] = {}
        self.hashmaps: dict[Any, Any] = {}


_shared: dict[str, Any] = {"mode": TensorCacheMode.SEPARATE_TENSOR_CACHE, "cache": None}


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    """Of all tensors that are made from now on."""
    assert isinstance(mode, TensorCacheMode)
    _shared["mode"] = mode


def get_tensor_cache_mode() -> TensorCacheMode:
    """The mode that is set."""
    mode: TensorCacheMode = _shared["mode"]
    return mode


def get_global_tensor_cache() -> TensorCache | None:
    """The one that tensors share, where they do."""
    cache: TensorCache | None = _shared["cache"]
    return cache


def set_global_tensor_cache(tensor_cache: TensorCache | None) -> None:
    """Another one."""
    _shared["cache"] = tensor_cache


def clear_global_tensor_cache() -> None:
    """None: the next tensor makes one."""
    set_global_tensor_cache(None)
