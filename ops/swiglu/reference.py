"""SwiGLU in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. With
s = σ(gate):

    dgate = dout·up·s·(1 + gate·(1 - s))        dup = dout·gate·s
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.rms_norm.reference import contiguous
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.swiglu.shapes import check, check_cotangent, check_packed, half_shape

__all__ = ["swiglu", "swiglu_backward", "swiglu_packed", "swiglu_packed_backward"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """out, in gate's dtype."""
    check("swiglu", gate, up)
    return _forward(gate, up)


def swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup, in gate's dtype."""
    check("swiglu_backward", gate, up)
    check_cotangent("swiglu_backward", dout, gate, "gate", tuple(gate.shape))
    dgate, dup = _backward(dout, gate, up)
    return contiguous(dgate), contiguous(dup)


def swiglu_packed(x: Tensor) -> Tensor:
    """The same of the halves of x's rows, the gate first."""
    check_packed("swiglu_packed", x)
    return _forward(*_halves(x))


def swiglu_packed_backward(dout: Tensor, x: Tensor) -> Tensor:
    """dx, in x's dtype."""
    check_packed("swiglu_packed_backward", x)
    check_cotangent("swiglu_packed_backward", dout, x, "x", half_shape(x))
    return torch.cat(_backward(dout, *_halves(x)), -1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    product = F.silu(gate.to(wide(gate.dtype))) * up.to(wide(gate.dtype))
    return contiguous(product.to(gate.dtype))


def _backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, g, u = (t.to(wide(gate.dtype)) for t in (dout, gate, up))
    s = g.sigmoid()
    dgate, dup = dy * u * (s * (1 + g * (1 - s))), dy * (g * s)
    return dgate.to(gate.dtype), dup.to(gate.dtype)
