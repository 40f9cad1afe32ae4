"""The calls of VMamba's extensions: real A, groups of B and C, no gate."""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _scan
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["bwd", "fwd"]


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    out_float: bool,
) -> list[Tensor]:
    """`[out, x]`, with `x` as `_scan.saved` has it.

    Args:
        u: (b, d, l).
        delta: (b, d', l) where d' divides d: channel i takes row i // (d/d').
        A: (d, N), real.
        B: (b, G, N, l).
        C: like B.
        D: (d,), or None.
        delta_bias: (d',), or None.
        delta_softplus: whether delta + delta_bias passes through softplus.
        out_float: out in float32, whatever u's dtype, not rounded to that on the way.

    Raises:
        ValueError: A is complex, or B or C is not 4-D.
    """
    if A.is_complex() or B.dim() != 4 or C.dim() != 4:
        raise ValueError(
            "selective_scan_cuda_oflex and _core take a real A and B, C of (b, G, N, l) only; "
            f"got A {A.dtype}, B {tuple(B.shape)}, C {tuple(C.shape)}"
        )
    delta, delta_bias = _broadcast(u, delta, delta_bias)
    if out_float and u.element_size() < 4:
        u, delta, B, C = u.float(), delta.float(), B.float(), C.float()
    return list(_scan.scan(u, delta, A, B, C, D, delta_bias, delta_softplus))


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    delta_softplus: bool,
) -> list[Any]:
    """Gradients of all tensors, in their own shapes and dtypes; `dout` is float32 or of u's."""
    out_float = dout.dtype == torch.float32

    def again(*inputs: Any) -> Tensor:
        given: tuple[Any, ...] = (*inputs, delta_softplus, out_float)
        return fwd(*given)[0]

    return differentiated(again, (u, delta, A, B, C, D, delta_bias), dout)


def _broadcast(u: Tensor, delta: Tensor, delta_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    repeats = u.shape[1] // delta.shape[1]
    if repeats == 1:
        return delta, delta_bias
    bias = None if delta_bias is None else delta_bias.repeat_interleave(repeats, 0)
    return delta.repeat_interleave(repeats, 1), bias
