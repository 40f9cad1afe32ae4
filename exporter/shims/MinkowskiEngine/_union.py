"""Tensors with voxels of their own, together."""

import torch

from fuseport.exporter.shims import _voxels

from .MinkowskiCommon import MinkowskiModuleBase
from .MinkowskiSparseTensor import SparseTensor

__all__ = ["MinkowskiUnion"]


class MinkowskiUnion(MinkowskiModuleBase):
    """All their voxels, and the sums of their features."""

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        """Of two or more with one manager."""
        assert all(isinstance(each, SparseTensor) for each in inputs), "Inputs: sparse tensors"
        assert len(inputs) > 1, "input must be a set with at least 2 SparseTensors"
        manager = inputs[0].coordinate_manager
        assert all(each.coordinate_manager is manager for each in inputs), (
            "All inputs must have the same coordinate manager."
        )
        key = manager.merge([each.coordinate_map_key for each in inputs])
        found = [_voxels.taken(each.F, manager.at(each.coordinate_map_key, key)) for each in inputs]
        return SparseTensor(
            torch.stack(found).sum(0), coordinate_map_key=key, coordinate_manager=manager
        )
