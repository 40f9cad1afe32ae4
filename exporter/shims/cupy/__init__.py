"""Stands in for `cupy`: kernels can be made of their text, and say what they are when launched.

Autograd functions of files that import it compute by torch where their kernels are known, see
`_raw_kernels`. The rest of CuPy, its arrays first of all, can be named and not called.
"""

from typing import Any

import numpy as np

from fuseport.exporter.shims._cupy import Placeholder, RawKernel, RawModule, memoize

from . import cuda, util

__all__ = ["RawKernel", "RawModule", "cuda", "memoize", "util"]
__version__ = "13.6.0"

_util = util

_SCALARS = frozenset(
    (
        *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(np, name) if name in _SCALARS else Placeholder(f"{__name__}.{name}")
