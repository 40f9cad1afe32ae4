"""What the inputs of SwiGLU must be, and the shapes, dtypes and strides of its outputs.

`torch.cpp` has the same checks in the same order with the same messages, for hosts that have no
Python. All outputs are contiguous, whatever the inputs are.
"""

from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.rms_norm.shapes import flat
from fuseport.ops.spec import FLOATING

__all__ = [
    "check",
    "check_cotangent",
    "check_packed",
    "fake_packed",
    "fake_packed_backward",
    "fake_swiglu",
    "fake_swiglu_backward",
    "half_shape",
]


def check(op: str, gate: Tensor, up: Tensor) -> None:
    """Raises ValueError, naming `op` and the argument, unless the two halves fit each other."""
    _check_first(op, "gate", gate)
    require_like(op, "up", up, gate.dtype, gate, "gate")
    require_shape(op, "up", up, "gate's shape", tuple(gate.shape))


def check_packed(op: str, x: Tensor) -> None:
    """Raises ValueError, naming `op` and the argument, unless `x` holds two halves."""
    _check_first(op, "x", x)
    require(x.shape[-1] % 2 == 0, op, "x", "of an even last size", x.shape[-1])


def _check_first(op: str, name: str, t: Tensor) -> None:
    require(t.dim() >= 1, op, name, "(..., d)", tuple(t.shape))
    known = "float16, bfloat16, float32 or float64"
    require(t.dtype in FLOATING, op, name, known, dtype_name(t.dtype))


def check_cotangent(
    op: str, dout: Tensor, first: Tensor, name: str, shape: tuple[int, ...]
) -> None:
    """Raises ValueError unless the cotangent fits inputs that passed their check."""
    require_like(op, "dout", dout, first.dtype, first, name)
    require_shape(op, "dout", dout, "the output's shape", shape)


def half_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of one of the halves."""
    return (*x.shape[:-1], x.shape[-1] // 2)


def fake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The empty output of `fuseport::swiglu`."""
    check("swiglu", gate, up)
    return flat(gate)


def fake_swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::swiglu_backward`."""
    check("swiglu_backward", gate, up)
    check_cotangent("swiglu_backward", dout, gate, "gate", tuple(gate.shape))
    return flat(gate), flat(up)


def fake_packed(x: Tensor) -> Tensor:
    """The empty output of `fuseport::swiglu_packed`."""
    check_packed("swiglu_packed", x)
    return x.new_empty(half_shape(x))


def fake_packed_backward(dout: Tensor, x: Tensor) -> Tensor:
    """The empty output of `fuseport::swiglu_packed_backward`."""
    check_packed("swiglu_packed_backward", x)
    check_cotangent("swiglu_packed_backward", dout, x, "x", half_shape(x))
    return flat(x)
