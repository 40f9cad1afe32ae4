"""Several tensors side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import functional as F
from .core import SparseConvTensor
from .modules import SparseModule

__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"]


class _OfAligned(SparseModule):
    combine: Callable[[list[Tensor]], Tensor]

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """Of tensors with the same voxels, and features of one width."""
        first = input[0]
        for each in input:
            assert each.spatial_shape == first.spatial_shape, "of one shape"
            assert each.features.shape[1] == first.features.shape[1], "of one width"
        return first.replace_feature(type(self).combine([each.features for each in input]))

    def input_spatial_size(self, out_size: Any) -> Any:
        """The size that makes `out_size`."""
        return out_size


class JoinTable(_OfAligned):
    """Features one after another."""

    combine = staticmethod(lambda features: torch.cat(features, 1))


class AddTable(_OfAligned):
    """Sums of features."""

    combine = staticmethod(lambda features: torch.stack(features).sum(0))


class AddTableMisaligned(SparseModule):
    """Sums of features of tensors with voxels of their own."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """See `functional.sparse_add`."""
        return F.sparse_add_hash_based(*input)

    def input_spatial_size(self, out_size: Any) -> Any:
        """The size that makes `out_size`."""
        return out_size


class ConcatTable(SparseModule):
    """Modules that all take the same."""

    def forward(self, input: Any) -> list[Any]:
        """What each gives."""
        return [module(input) for module in self.children()]

    def add(self, module: Any) -> "ConcatTable":
        """One more."""
        self.add_module(str(len(self._modules)), module)
        return self

    def input_spatial_size(self, out_size: Any) -> Any:
        """The size that makes `out_size`, as the first has it."""
        return self._modules["0"].input_spatial_size(out_size)  # type: ignore[union-attr, operator]
