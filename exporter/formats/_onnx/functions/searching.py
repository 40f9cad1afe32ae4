"""Places in sorted values, for which ONNX has no operator: by sorting both together.

In order with the values, a place is how many sorted ones came before it. That takes one TopK and
one CumSum for any number of values, where a search by halves takes a gather for each bit.
"""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program.rewriting import Table

__all__ = ["SEARCHING"]

aten = torch.ops.aten


def _searchsorted(
    sequence: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """`torch.searchsorted`: sequence is (…, n), values are (…, m), or of any shape where it is (n).

    The first of equal values comes first in TopK: values stand before the sequence where they are
    to be placed before what equals them.
    """
    if not isinstance(values, Tensor):
        values = torch.scalar_tensor(values, dtype=sequence.dtype, device=sequence.device)
    ordered = sequence if sorter is None else sequence.gather(-1, sorter)
    of_one = sequence.dim() == 1
    wanted = values.reshape(-1) if of_one else values
    wide = torch.promote_types(ordered.dtype, wanted.dtype)
    ordered, wanted = ordered.to(wide), wanted.to(wide)
    last = right if side is None else side == "right"
    both = torch.cat([ordered, wanted] if last else [wanted, ordered], -1)
    count, of_sequence = both.shape[-1], ordered.shape[-1]
    order = torch.topk(both, count, -1, largest=False, sorted=True).indices
    is_sorted = order < of_sequence if last else order >= wanted.shape[-1]
    passed = is_sorted.to(torch.int64).cumsum(-1)
    place = torch.zeros_like(passed).scatter(-1, order, passed)
    start = of_sequence if last else 0
    found = place.narrow(-1, start, wanted.shape[-1])
    found = found.reshape(values.shape) if of_one else found
    return found.to(torch.int32) if out_int32 else found


def _bucketize(
    values: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)


SEARCHING: Table = {
    aten.searchsorted.Tensor: _searchsorted,
    aten.searchsorted.Scalar: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.bucketize.Scalar: _bucketize,
}
