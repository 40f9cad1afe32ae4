"""Several tensors as one batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensor import SparseTensor

__all__ = ["sparse_collate", "sparse_collate_fn"]


def sparse_collate(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Of tensors of one stride, with coordinates (n_b, 3)."""
    stride, coords, feats = inputs[0].stride, [], []
    for batch, each in enumerate(inputs):
        assert each.stride == stride, (each.stride, stride)
        rows = torch.as_tensor(each.coords)
        column = torch.full((rows.shape[0], 1), batch, dtype=torch.int, device=rows.device)
        coords.append(torch.cat([column, rows], 1))
        feats.append(torch.as_tensor(each.feats))
    return SparseTensor(torch.cat(feats), torch.cat(coords), stride)


def sparse_collate_fn(inputs: Sequence[Any]) -> Any:
    """Of dictionaries of tensors, arrays and others, as a data loader has them."""
    if not isinstance(inputs[0], dict):
        return inputs
    return {name: _joined([each[name] for each in inputs]) for name in inputs[0]}


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return sparse_collate_fn(values)
    if isinstance(values[0], (np.ndarray, Tensor)):
        return torch.stack([torch.as_tensor(value) for value in values])
    if isinstance(values[0], SparseTensor):
        return sparse_collate(values)
    return values
