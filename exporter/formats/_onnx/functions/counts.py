"""How often each number occurs, where torch.onnx has no form: at least as many as a size says, and
sums of weights."""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program.rewriting import Table

__all__ = ["COUNTS"]

aten = torch.ops.aten


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: Any = 0) -> Any:
    of_size = not isinstance(minlength, int)
    if weights is None and not of_size:
        return NotImplemented
    x = x.long()
    # Each number below the size once more, which is not counted.
    more = torch.arange(minlength, device=x.device)
    counts = aten.bincount.default(torch.cat([x, more]))
    if weights is None:
        return counts - (torch.arange(counts.shape[0], device=x.device) < minlength).long()
    wide = weights if weights.is_floating_point() else weights.double()
    return wide.new_zeros(counts.shape[0]).scatter_add(0, x, wide)


COUNTS: Table = {aten.bincount.default: _bincount}
