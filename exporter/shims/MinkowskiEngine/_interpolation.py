"""Features between voxels."""

from torch import Tensor

from .MinkowskiCommon import MinkowskiModuleBase
from .MinkowskiSparseTensor import SparseTensor, interpolated

__all__ = ["MinkowskiInterpolation"]


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Linear interpolation at points; of neighbours that are no voxels nothing is added.

    Raises:
        NotImplementedError: maps or weights are asked for.
    """

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False) -> None:
        super().__init__()
        if return_kernel_map or return_weights:
            raise NotImplementedError(
                "MinkowskiEngine's MinkowskiInterpolation was made to return maps or weights, "
                "which are in no order: take its features alone"
            )

    def forward(self, input: SparseTensor, tfield: Tensor) -> Tensor:
        """(p, c), at points (p, 1 + d)."""
        return interpolated(input, tfield)
