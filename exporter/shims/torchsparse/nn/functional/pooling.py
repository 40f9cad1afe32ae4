"""Pooling over each batch."""

import torch
from torch import Tensor

from fuseport.exporter.shims.torch_scatter import scatter_max, scatter_sum
from fuseport.exporter.shims.torch_scatter._scatter import groups

from ...tensor import SparseTensor

__all__ = ["global_avg_pool", "global_max_pool"]


def global_avg_pool(inputs: SparseTensor) -> Tensor:
    """(batch, c): the mean."""
    batch = inputs.coords[:, 0].long()
    count = groups(batch)
    ones = torch.ones_like(inputs.feats[:, :1])
    total = scatter_sum(inputs.feats, batch, 0, dim_size=count)
    return total / scatter_sum(ones, batch, 0, dim_size=count)


def global_max_pool(inputs: SparseTensor) -> Tensor:
    """(batch, c): the largest value, of those that are alike the first."""
    return scatter_max(inputs.feats, inputs.coords[:, 0].long(), 0)[0]
