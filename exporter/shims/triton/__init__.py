"""Stands in for `triton`: kernels can be defined, and say what they are when they are launched.

Names that are not here, and all of `triton.language`, are placeholders; see `triton._any`.
"""

from typing import Any

from fuseport.exporter.shims._triton import (
    Config,
    JITFunction,
    Placeholder,
    autotune,
    constexpr_function,
    heuristics,
    jit,
    next_power_of_2,
    reinterpret,
)

__all__ = [
    "Config",
    "JITFunction",
    "autotune",
    "cdiv",
    "constexpr_function",
    "heuristics",
    "jit",
    "next_power_of_2",
    "reinterpret",
]
__version__ = "3.4.0"


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Placeholder(f"{__name__}.{name}")
