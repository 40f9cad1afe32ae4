"""Pooling over each batch."""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims.torch_scatter import scatter_max, scatter_sum
from fuseport.exporter.shims.torch_scatter._scatter import sized

from ...tensor import SparseTensor

__all__ = ["batches", "global_avg_pool", "global_max_pool"]


def global_avg_pool(inputs: SparseTensor) -> Tensor:
    """(batch, c): the mean."""
    batch, count = batches(inputs)
    ones = torch.ones_like(inputs.feats[:, :1])
    total = scatter_sum(inputs.feats, batch, 0, dim_size=count)
    return total / scatter_sum(ones, batch, 0, dim_size=count)


def global_max_pool(inputs: SparseTensor) -> Tensor:
    """(batch, c): the largest value, of those that are alike the first."""
    batch, count = batches(inputs)
    return scatter_max(inputs.feats, batch, 0, dim_size=count)[0]


def batches(inputs: SparseTensor) -> tuple[Tensor, Any]:
    """(n,), int64, the batch of each voxel; and one more than the largest, 0 where there is none.

    Programs, too, have to find a largest one among none.
    """
    batch = inputs.coords[:, 0].long()
    return batch, sized(torch.cat([batch, batch.new_full((1,), -1)]).max() + 1)
