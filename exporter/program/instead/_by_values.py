"""Functions of as many values as a mask selects, in a capture, where torch's ask whether there are.

Of none they give what torch gives: the logarithm of a sum is -∞.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from fuseport.exporter.program.portable._bags import bilinear

__all__ = ["BY_VALUES", "roll"]


def _logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.dim()))
    most = input.detach()
    for each in dims:  # of one more, or there may be no largest
        shape = [1 if i == each % input.dim() else size for i, size in enumerate(most.shape)]
        most = torch.cat([most, most.new_full(shape, -torch.inf)], each).amax(each, True)
    most = torch.where(most.isinf(), 0, most)
    out = (input - most).exp().sum(dims, True).log() + most
    return out if keepdim else out.squeeze(dims)


def roll(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    shifts = [shifts] if isinstance(shifts, int | SymInt) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return roll(input.flatten(), shifts, 0).reshape(input.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        count: Any = input.shape[dim]
        size = torch.scalar_tensor(torch.sym_max(count, 1), dtype=torch.int64, device=input.device)
        places = torch.remainder(torch.arange(count, device=input.device) - shift, size)
        input = input.index_select(dim, places)
    return input


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Any:
    """(…, m, d), (…, n, d) → (…, m, n), with a derivative of 0 where a distance is 0."""
    off = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 1:
        return off.abs().sum(-1)
    if p != 2:
        return torch.ops.aten.cdist.default(x1, x2, p)
    squares = off.square().sum(-1)
    some = squares != 0
    return torch.where(some, torch.where(some, squares, 1).sqrt(), 0)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return bilinear(input1, input2, weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    given = (running_mean, running_var, weight, bias, training, momentum, eps)
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, *given)
    # torch's operator for this divides by zero in the gradient of none, and ends the process.
    wide = torch.promote_types(input.dtype, torch.float32)  # as its kernels compute of halves
    scale = torch.rsqrt(running_var.to(wide) + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    shift = shift if bias is None else shift + bias
    behind = (None,) * (input.dim() - 2)
    return (input * scale[:, *behind] + shift[:, *behind]).to(input.dtype)


def _all_of(names: Sequence[str], form: Any) -> dict[Any, Any]:
    return {
        getattr(of, name): form for of in (torch, Tensor) for name in names if hasattr(of, name)
    }


BY_VALUES: dict[Any, Any] = {
    F.batch_norm: _batch_norm,
    **_all_of(["logsumexp"], _logsumexp),
    **_all_of(["roll"], roll),
    **_all_of(["cdist"], _cdist),
    **_all_of(["bilinear"], _bilinear),
}
"""What to compute for a function of tensors whose sizes hang on values."""
