"""A linear layer over a weight that is frozen: what the references of ops that store one share."""

import torch
from torch import Tensor

__all__ = ["linear", "linear_backward"]


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
