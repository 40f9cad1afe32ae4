"""The rotary kernel's call, over the registered op; see `fuseport.ops.rotary_embedding`."""

import torch
from torch import Tensor

from fuseport.exporter.shims._dtypes import beside
from fuseport.ops.packed import Packed
from fuseport.ops.rotary_embedding import rotary_embedding

__all__ = ["apply_rotary"]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Pairs of the first r channels, turned by the angles of their steps.

    Args:
        x: (b, l, h, p), or (n, h, p) with `cu_seqlens`; float16, bfloat16, float32 or float64.
        cos: (m, r/2), of each pair's angle at each step, m above any step here; or (b, m, r/2)
            where seqlen_offsets is a number. In x's dtype, or float32 beside a half type; others
            are cast.
        sin: as cos.
        seqlen_offsets: which step the first is, a number or (b,), integers.
        cu_seqlens: (b + 1,), where each packed sequence begins, and the end of the last; or None.
        max_seqlen: not needed here.
        interleaved: pairs are channels 2i and 2i + 1; else i and i + r/2.
        inplace: x is overwritten and returned.
        conjugate: by the opposite angles.

    Returns:
        x's shape and dtype, contiguous unless it is x.

    Raises:
        ValueError: as the op: a shape, dtype or device does not fit.
    """
    cos, sin = (_of_steps(table, x, seqlen_offsets, cu_seqlens) for table in (cos, sin))
    cos, sin = beside(cos, x), beside(sin, x)
    heads_first = x.transpose(-3, -2)
    of_batch = heads_first[None] if x.dim() == 3 else heads_first
    out = rotary_embedding(of_batch, cos, -sin if conjugate else sin, interleaved)
    out = (out[0] if x.dim() == 3 else out).transpose(-3, -2)
    return x.copy_(out) if inplace else out.contiguous()


def _of_steps(table: Tensor, x: Tensor, offsets: int | Tensor, starts: Tensor | None) -> Tensor:
    """The rows of (m, r/2) for the steps of x: (l, r/2), (b, l, r/2) or (n, r/2)."""
    if starts is None:
        if not isinstance(offsets, Tensor):
            return table[..., offsets : offsets + x.shape[1], :]
        return table[offsets[:, None] + torch.arange(x.shape[1], device=x.device)]
    steps = Packed.of(starts, x.shape[0])
    first = offsets[steps.sequence] if isinstance(offsets, Tensor) else offsets
    return table[steps.from_start + first]
