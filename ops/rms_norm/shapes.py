"""What the inputs of a norm must be, and the shapes, dtypes and strides of its outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python; a test holds the two against each other. `rms_norm_gated` uses both. All outputs are
contiguous, whatever the inputs are.
"""

import math

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape

__all__ = [
    "check",
    "check_backward",
    "fake_norm",
    "fake_norm_backward",
    "flat",
    "group_size_of",
    "outputs",
    "wide",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a norm of that dtype is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def group_size_of(weight: Tensor, group_size: int | None) -> int:
    """The size that an operator takes, for None the number of channels."""
    return max(weight.numel(), 1) if group_size is None else group_size


def check(
    op: str, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(x.dim() >= 1, op, "x", "(..., d)", tuple(x.shape))
    require(
        x.dtype in _DTYPES, op, "x", "float16, bfloat16, float32 or float64", dtype_name(x.dtype)
    )
    d = x.shape[-1]
    if z is not None:
        require_like(op, "z", z, x.dtype, x, "x")
        require_shape(op, "z", z, "x's shape", tuple(x.shape))
    if weight.dtype != x.dtype and x.dtype in (torch.float16, torch.bfloat16):
        either = f"{dtype_name(x.dtype)} or float32"
        require(weight.dtype == torch.float32, op, "weight", either, dtype_name(weight.dtype))
    else:
        require_like(op, "weight", weight, x.dtype, x, "x")
    require_like(op, "weight", weight, weight.dtype, x, "x")
    require_shape(op, "weight", weight, "(d,)", (d,))
    require(math.isfinite(eps) and eps >= 0, op, "eps", "finite and not negative", format(eps, "g"))
    divides = group_size >= 1 and d % group_size == 0
    require(divides, op, "group_size", f"a divisor of {d} channels", group_size)


def check_backward(op: str, dout: Tensor, x: Tensor, rstd: Tensor, group_size: int) -> None:
    """Raises ValueError unless cotangent and saved output fit inputs that passed `check`."""
    require_like(op, "dout", dout, x.dtype, x, "x")
    require_shape(op, "dout", dout, "x's shape", tuple(x.shape))
    require_like(op, "rstd", rstd, wide(x.dtype), x, "x")
    groups = (*x.shape[:-1], x.shape[-1] // group_size)
    require_shape(op, "rstd", rstd, "(..., d/group_size)", groups)


def flat(t: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of `t`'s shape, dtype and device."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def outputs(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Empty `out` and `rstd`."""
    groups = (*x.shape[:-1], x.shape[-1] // group_size)
    return flat(x), torch.empty(groups, dtype=wide(x.dtype), device=x.device)


def fake_norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::rms_norm`."""
    check("rms_norm", x, None, weight, eps, group_size)
    return outputs(x, group_size)


def fake_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, eps: float, group_size: int
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::rms_norm_backward`."""
    check("rms_norm_backward", x, None, weight, eps, group_size)
    check_backward("rms_norm_backward", dout, x, rstd, group_size)
    return flat(x), flat(weight)
