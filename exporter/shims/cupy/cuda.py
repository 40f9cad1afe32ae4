"""Stands in for `cupy.cuda`: texts are compiled to kernels that cannot be launched."""

from typing import Any

from fuseport.exporter.shims._cupy import Placeholder, RawModule

__all__ = ["compile_with_cache", "get_cuda_path"]


def compile_with_cache(source: str, *args: Any, **options: Any) -> RawModule:
    """A module, of which `get_function` gives the kernels."""
    return RawModule(code=source)


def get_cuda_path() -> str:
    """Where CUDA would be: code adds folders of it to what it includes from."""
    return "/usr/local/cuda"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Placeholder(f"{__name__}.{name}")
