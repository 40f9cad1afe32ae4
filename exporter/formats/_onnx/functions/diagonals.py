"""What is written to diagonals, of which torch's own form is a copy into a view."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["DIAGONALS"]


def _diagonal_scatter(
    x: Tensor, values: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """(…, n, m), and (…, k) for the places (i, i + offset) of the dimensions `dim1`, `dim2`."""
    matrices = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(size, device=x.device) for size in matrices.shape[-2:])
    there = columns - rows[:, None] == offset
    # Along one of both dimensions the diagonal begins at 0, and there values have their places.
    number = rows if offset >= 0 else columns
    count: Any = values.shape[-1]
    last = torch.scalar_tensor(count, dtype=torch.int64, device=x.device)
    with_one = torch.cat([values, values.new_zeros([*values.shape[:-1], 1])], -1)  # or none to take
    each = with_one.index_select(-1, torch.minimum(number, last))
    written = torch.where(there, each.unsqueeze(-1 if offset >= 0 else -2), matrices)
    return written.movedim((-2, -1), (dim1, dim2))


DIAGONALS = {torch.ops.aten.diagonal_scatter.default: _diagonal_scatter}
"""Forms that have an ONNX operator for each part."""
