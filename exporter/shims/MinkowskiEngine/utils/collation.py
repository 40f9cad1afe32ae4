"""Several clouds of points as one batch."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SparseCollation", "batch_sparse_collate", "batched_coordinates", "sparse_collate"]


def batched_coordinates(
    coords: Sequence[Any], dtype: torch.dtype = torch.int32, device: Any = None
) -> Tensor:
    """(n, 1 + d): of several (n_b, d), rounded down if they are to be integers."""
    assert dtype in (torch.int32, torch.float32), "Only torch.int32 and torch.float32"
    clouds = [torch.as_tensor(cloud) for cloud in coords]
    assert all(cloud.ndim == 2 for cloud in clouds), "All coordinates must be in a 2D array."
    assert len({cloud.shape[1] for cloud in clouds}) == 1, "Dimension of the array mismatch."
    rows = []
    for batch, cloud in enumerate(clouds):
        if dtype == torch.int32 and cloud.is_floating_point():
            cloud = cloud.floor()
        column = cloud.new_full((cloud.shape[0], 1), batch)
        rows.append(torch.cat([column, cloud], 1).to(dtype))
    return torch.cat(rows).to(device)


def sparse_collate(
    coords: Sequence[Any],
    feats: Sequence[Any],
    labels: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.int32,
    device: Any = None,
) -> Any:
    """`batched_coordinates`, features (n, c), and labels, if there are some."""
    rows = batched_coordinates(coords, dtype, device)
    features = torch.cat([torch.as_tensor(each) for each in feats])
    assert rows.shape[0] == features.shape[0], "as many coordinates as features"
    if labels is None:
        return rows, features
    each = [torch.as_tensor(label) if hasattr(label, "shape") else label for label in labels]
    joined: Any = torch.cat(each) if isinstance(each[0], Tensor) else each
    return rows, features, joined


def batch_sparse_collate(
    data: Sequence[Any], dtype: torch.dtype = torch.int32, device: Any = None
) -> Any:
    """`sparse_collate` of a list of coordinates, features and labels."""
    each: list[Any] = list(zip(*data, strict=True))
    labels = each[2] if len(each) > 2 else None
    return sparse_collate(each[0], each[1], labels, dtype, device)


class SparseCollation:
    """The same for a data loader.

    Args:
        limit_numpoints: clouds are left out from the one on that has more points, with those
            before it; 0 or less for no limit.
    """

    def __init__(
        self, limit_numpoints: int = -1, dtype: torch.dtype = torch.int32, device: Any = None
    ) -> None:
        self.limit_numpoints = limit_numpoints
        self.dtype = dtype
        self.device = device

    def __call__(self, list_data: Sequence[Any]) -> Any:
        """Of a list of coordinates, features and labels."""
        kept = len(list_data)
        if self.limit_numpoints > 0:
            totals = itertools.accumulate(len(each[0]) for each in list_data)
            kept = sum(total <= self.limit_numpoints for total in totals)
        if kept < len(list_data):
            warnings.warn(f"{len(list_data) - kept} clouds are over the limit", stacklevel=2)
        return batch_sparse_collate(list_data[:kept], self.dtype, self.device)
