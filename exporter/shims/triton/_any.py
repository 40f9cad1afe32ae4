"""Every submodule of `triton` that has no file of its own: its names are placeholders, but for
those of what code makes and passes to kernels."""

from typing import Any

from fuseport.exporter.shims._triton import Placeholder, TensorDescriptor, constexpr_function

__all__: list[str] = []

_OWN = {"TensorDescriptor": TensorDescriptor, "constexpr_function": constexpr_function}


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return _OWN[name]
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Placeholder(f"{__name__}.{name}")
