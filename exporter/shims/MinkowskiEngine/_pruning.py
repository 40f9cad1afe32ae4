"""Some of a tensor's voxels."""

from torch import Tensor

from .MinkowskiCommon import MinkowskiModuleBase
from .MinkowskiSparseTensor import SparseTensor

__all__ = ["MinkowskiPruning"]


class MinkowskiPruning(MinkowskiModuleBase):
    """Those that a mask keeps, in their order."""

    def forward(self, input: SparseTensor, mask: Tensor) -> SparseTensor:
        """Of a mask (n,), True where a voxel is kept."""
        assert isinstance(input, SparseTensor)
        keep = mask.bool().nonzero().squeeze(1)
        return SparseTensor(
            input.F[keep],
            coordinate_map_key=input.coordinate_manager.prune(input.coordinate_map_key, keep),
            coordinate_manager=input.coordinate_manager,
        )
