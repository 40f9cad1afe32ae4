"""What Triton's stand-in is made of: kernels that torch computes, and placeholders.

A kernel's own Python function is called once for all programs of the grid (`launch`), on blocks
that are tensors of all of them (`values`), by functions of Triton's language (`language`,
`reductions`, `blocks`); what it points at is read and written as views where offsets are linear
(`memory`, `places`, `boxes`).
"""

from fuseport.exporter.shims._triton.host import (
    TensorDescriptor,
    constexpr_function,
    reinterpret,
)
from fuseport.exporter.shims._triton.kernels import (
    Config,
    JITFunction,
    Placeholder,
    autotune,
    heuristics,
    jit,
)
from fuseport.exporter.shims._triton.language import next_power_of_2

__all__ = [
    "Config",
    "JITFunction",
    "Placeholder",
    "TensorDescriptor",
    "autotune",
    "constexpr_function",
    "heuristics",
    "jit",
    "next_power_of_2",
    "reinterpret",
]
