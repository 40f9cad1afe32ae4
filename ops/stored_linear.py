"""A linear layer over a weight that is frozen and stored: what ops with such a weight share."""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape

__all__ = [
    "check_layer",
    "check_rows",
    "empty",
    "empty_backward",
    "linear",
    "linear_backward",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_rows(op: str, name: str, meaning: str, t: Tensor) -> None:
    """Raises ValueError, naming `op` and the argument, unless it is rows of a dtype of layers."""
    require(t.dim() >= 1, op, name, meaning, tuple(t.shape))
    known = "float16, bfloat16, float32 or float64"
    require(t.dtype in _DTYPES, op, name, known, dtype_name(t.dtype))


def check_layer(op: str, x: Tensor, bias: Tensor, in_features: int) -> None:
    """Raises ValueError, naming `op` and the argument, unless input and bias fit each other."""
    check_rows(op, "x", "(..., in_features)", x)
    sizes = (*x.shape[:-1], in_features)
    require_shape(op, "x", x, "(..., in_features)", sizes)
    require_like(op, "bias", bias, x.dtype, x, "x")
    require(bias.dim() == 1, op, "bias", "(out_features,)", tuple(bias.shape))


def empty(x: Tensor, bias: Tensor) -> Tensor:
    """A layer's output, empty."""
    return torch.empty((*x.shape[:-1], bias.shape[0]), dtype=x.dtype, device=x.device)


def empty_backward(dout: Tensor, in_features: int) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's input and bias, empty."""
    dx = torch.empty((*dout.shape[:-1], in_features), dtype=dout.dtype, device=dout.device)
    return dx, torch.empty((dout.shape[-1],), dtype=dout.dtype, device=dout.device)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x·Wᵀ + bias in the weight's dtype, rounded to x's; contiguous."""
    out = x.to(weight.dtype) @ weight.T + bias.to(weight.dtype)
    return _contiguous(out.to(x.dtype))


def linear_backward(dout: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dout·W and the sum of the rows of dout in the weight's dtype, rounded to dout's."""
    dy = dout.to(weight.dtype)
    dbias = dy.unsqueeze(0).flatten(0, -2).sum(0)
    return _contiguous((dy @ weight).to(dout.dtype)), _contiguous(dbias.to(dout.dtype))


def _contiguous(t: Tensor) -> Tensor:
    """`t` with the strides of a new tensor, which `contiguous` leaves as they are at sizes of 1."""
    wanted = torch.empty(t.shape, device="meta").stride()
    return t if t.stride() == wanted else t.clone(memory_format=torch.contiguous_format)
