"""What the inputs of walks over an image must be, and the shapes, dtypes and strides of outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python. `cross_merge` uses both. Walks are (b, 4, C, H, W) here: H and W then need no argument. All
outputs are contiguous, whatever the inputs are.
"""

from torch import Tensor

from fuseport.ops.checks import dtype_name, require
from fuseport.ops.spec import FLOATING

__all__ = ["check_image", "check_walks", "fake_scan", "fake_scan_backward", "merged", "walks"]


def check_image(op: str, name: str, t: Tensor) -> None:
    """Raises ValueError, naming `op` and the argument, unless `t` can be an image."""
    require(t.dim() == 4, op, name, "(b, C, H, W)", tuple(t.shape))
    _check_dtype(op, name, t)


def check_walks(op: str, name: str, t: Tensor) -> None:
    """Raises ValueError, naming `op` and the argument, unless `t` can be four walks."""
    fits = t.dim() == 5 and t.shape[1] == 4
    require(fits, op, name, "(b, 4, C, H, W)", tuple(t.shape))
    _check_dtype(op, name, t)


def _check_dtype(op: str, name: str, t: Tensor) -> None:
    known = "float16, bfloat16, float32 or float64"
    require(t.dtype in FLOATING, op, name, known, dtype_name(t.dtype))


def walks(x: Tensor) -> Tensor:
    """Uninitialised walks over an image."""
    b, channels, height, width = x.shape
    return x.new_empty((b, 4, channels, height, width))


def merged(ys: Tensor) -> Tensor:
    """The uninitialised sum of walks."""
    b, _, channels, height, width = ys.shape
    return ys.new_empty((b, channels, height, width))


def fake_scan(x: Tensor) -> Tensor:
    """The empty output of `fuseport::cross_scan`."""
    check_image("cross_scan", "x", x)
    return walks(x)


def fake_scan_backward(dout: Tensor) -> Tensor:
    """The empty output of `fuseport::cross_scan_backward`."""
    check_walks("cross_scan_backward", "dout", dout)
    return merged(dout)
