"""What a batch has, at each of its voxels."""

import torch
from torch import Tensor

from .MinkowskiCommon import BroadcastMode, MinkowskiModuleBase
from .MinkowskiSparseTensor import SparseTensor

__all__ = [
    "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition",
    "MinkowskiBroadcastBase",
    "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastMultiplication",
]


class MinkowskiBroadcastBase(MinkowskiModuleBase):
    """A batch's features added to those of its voxels, or multiplied by them."""

    def __init__(self, operation_type: BroadcastMode) -> None:
        super().__init__()
        assert isinstance(operation_type, BroadcastMode)
        self.operation_type = operation_type

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """At the voxels of `input`, with what a global pooling gives."""
        own, others = input.F, at_voxels(input, input_glob)
        is_sum = self.operation_type == BroadcastMode.ELEMENTWISE_ADDITON
        return input.with_features(own + others if is_sum else own * others)


class MinkowskiBroadcastAddition(MinkowskiBroadcastBase):
    """The sum."""

    def __init__(self) -> None:
        super().__init__(BroadcastMode.ELEMENTWISE_ADDITON)


class MinkowskiBroadcastMultiplication(MinkowskiBroadcastBase):
    """The product."""

    def __init__(self) -> None:
        super().__init__(BroadcastMode.ELEMENTWISE_MULTIPLICATION)


class MinkowskiBroadcast(MinkowskiModuleBase):
    """A batch's features in place of those of its voxels."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """At the voxels of `input`, with what a global pooling gives."""
        return input.with_features(at_voxels(input, input_glob))


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """Both, one after another."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """At the voxels of `input`, with what a global pooling gives."""
        return input.with_features(torch.cat([input.F, at_voxels(input, input_glob)], 1))


def at_voxels(input: SparseTensor, input_glob: SparseTensor) -> Tensor:
    """(n, c): of `input_glob`, with one row for each batch, that of each voxel's."""
    assert isinstance(input, SparseTensor)
    assert isinstance(input_glob, SparseTensor)
    return input_glob.F[input.coordinate_manager.batch_rows(input.coordinate_map_key)]
