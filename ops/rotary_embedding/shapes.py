"""What the inputs of a rotary embedding must be, and the shapes, dtypes and strides of its outputs.

All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.rms_norm.shapes import flat
from fuseport.ops.spec import FLOATING

__all__ = ["check", "check_cotangent", "fake_rotary", "fake_rotary_backward"]


def check(op: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(x.dim() == 4, op, "x", "(b, h, l, p)", tuple(x.shape))
    known = "float16, bfloat16, float32 or float64"
    require(x.dtype in FLOATING, op, "x", known, dtype_name(x.dtype))
    if x.dtype in (torch.float16, torch.bfloat16) and cos.dtype == torch.float32:
        require_like(op, "cos", cos, torch.float32, x, "x")
    else:
        require_like(op, "cos", cos, x.dtype, x, "x")
    b, _, length, channels = x.shape
    require(cos.dim() in (2, 3), op, "cos", "(l, r/2) or (b, l, r/2)", tuple(cos.shape))
    pairs = cos.shape[-1]
    if cos.dim() == 2:
        require_shape(op, "cos", cos, "(l, r/2)", (length, pairs))
    else:
        require_shape(op, "cos", cos, "(b, l, r/2)", (b, length, pairs))
    require(2 * pairs <= channels, op, "cos", f"of r/2 <= {channels}/2", pairs)
    require_like(op, "sin", sin, cos.dtype, x, "x")
    require_shape(op, "sin", sin, "cos's shape", tuple(cos.shape))


def check_cotangent(op: str, dout: Tensor, x: Tensor) -> None:
    """Raises ValueError unless the cotangent fits inputs that passed `check`."""
    require_like(op, "dout", dout, x.dtype, x, "x")
    require_shape(op, "dout", dout, "x's shape", tuple(x.shape))


def fake_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The empty output of `fuseport::rotary_embedding`."""
    check("rotary_embedding", x, cos, sin)
    return flat(x)


def fake_rotary_backward(
    dout: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fuseport::rotary_embedding_backward`."""
    check("rotary_embedding_backward", x, cos, sin)
    check_cotangent("rotary_embedding_backward", dout, x)
    return flat(x), flat(cos), flat(sin)
