"""Linear layers, tensors side by side, and ways between dense tensors and sparse ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .MinkowskiCommon import MinkowskiModuleBase
from .MinkowskiSparseTensor import SparseTensor
from .MinkowskiTensor import (
    COORDINATE_KEY_DIFFERENT_ERROR,
    COORDINATE_MANAGER_DIFFERENT_ERROR,
    SparseTensorQuantizationMode,
)
from .MinkowskiTensorField import TensorField

__all__ = [
    "MinkowskiLinear",
    "MinkowskiStackCat",
    "MinkowskiStackMean",
    "MinkowskiStackSum",
    "MinkowskiStackVar",
    "MinkowskiToDenseTensor",
    "MinkowskiToFeature",
    "MinkowskiToSparseTensor",
    "_sum",
    "cat",
    "dense_coordinates",
    "mean",
    "to_sparse",
    "to_sparse_all",
    "var",
]


class MinkowskiLinear(nn.Module):
    """`torch.nn.Linear`, as `linear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias)

    def forward(self, input: Any) -> Any:
        """Of a sparse tensor, or a field."""
        return input.with_features(self.linear(input.F))


def cat(*sparse_tensors: Any) -> Any:
    """Features one after another, of tensors with the same key, as arguments or as a list."""
    return _combined(sparse_tensors, lambda features: torch.cat(features, -1))


def _sum(*sparse_tensors: Any) -> Any:
    """Their sum."""
    return _combined(sparse_tensors, lambda features: torch.stack(features).sum(0))


def mean(*sparse_tensors: Any) -> Any:
    """Their mean."""
    return _combined(sparse_tensors, lambda features: torch.stack(features).mean(0))


def var(*sparse_tensors: Any) -> Any:
    """Their variance, of as many values as there are tensors."""
    return _combined(sparse_tensors, lambda features: torch.stack(features).var(0, correction=0))


def _combined(tensors: Sequence[Any], function: Callable[[list[Tensor]], Tensor]) -> Any:
    if len(tensors) == 1:
        assert isinstance(tensors[0], (tuple, list))
        tensors = tensors[0]
    assert len(tensors) > 1, "The input must be at least two tensors"
    first = tensors[0]
    for each in tensors:
        assert isinstance(each, (SparseTensor, TensorField)), "sparse tensors or tensor fields"
        assert type(each) is type(first), "Inputs must be either SparseTensors or TensorFields."
        assert each.coordinate_manager is first.coordinate_manager, (
            COORDINATE_MANAGER_DIFFERENT_ERROR
        )
        assert each.coordinate_key == first.coordinate_key, COORDINATE_KEY_DIFFERENT_ERROR
    return first.with_features(function([each.F for each in tensors]))


def dense_coordinates(shape: Sequence[Any]) -> Tensor:
    """(n, 1 + d), int32: all places of a tensor (b, c, …), the last dimension first."""
    assert len(shape) > 2, "Shape must be batch x channel x spatial dimensions."
    sizes = [shape[0], *shape[2:]]
    grids = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack([grid.flatten() for grid in grids], 1).int()


def to_sparse(
    x: Tensor, format: str | None = None, coordinates: Any = None, device: Any = None
) -> SparseTensor:
    """Voxels where a channel is not 0.

    Args:
        x: (b, c, …).
        format: where its batch, B, channels, C, and dimensions, X, are: BXXXC.
        coordinates: of no effect, as there.
    """
    assert x.ndim > 2, "Input has 0 spatial dimension."
    format = format or "BC" + "X" * (x.ndim - 2)
    assert len(format) == x.ndim, f"Invalid format: {format}. len(format) != x.ndim"
    assert format[0] == "B", "The input must have the batch axis first."
    assert format.count("C") == 1, "The format must indicate the channel axis"
    x = x.movedim(format.find("C"), -1)
    places = (x != 0).any(-1).nonzero()
    return SparseTensor(
        x[places.unbind(1)],
        places.int(),
        quantization_mode=SparseTensorQuantizationMode.NO_QUANTIZATION,
        device=device,
    )


def to_sparse_all(dense_tensor: Tensor, coordinates: Tensor | None = None) -> SparseTensor:
    """All places of (b, c, …) as voxels; `dense_coordinates` may be given."""
    if coordinates is None:
        coordinates = dense_coordinates(dense_tensor.shape)
    features = dense_tensor.movedim(1, -1).flatten(0, -2)
    return SparseTensor(
        features,
        coordinates.to(features.device),
        quantization_mode=SparseTensorQuantizationMode.NO_QUANTIZATION,
    )


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """The voxels of a field, or of a dense tensor.

    Of a dense one these are all places, but those with zeros alone if `remove_zeros` and
    `coordinates` are both given, as there.
    """

    def __init__(self, remove_zeros: bool = True, coordinates: Tensor | None = None) -> None:
        super().__init__()
        self.remove_zeros = remove_zeros
        self.coordinates = coordinates

    def forward(self, input: Any) -> SparseTensor:
        """Raises ValueError of anything else."""
        if isinstance(input, TensorField):
            return input.sparse()
        if not isinstance(input, Tensor):
            raise ValueError("Only TensorField and torch.Tensor are supported")
        if self.remove_zeros and self.coordinates is not None:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """A dense tensor, of a shape that may be given."""

    def __init__(self, shape: Any = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> Tensor:
        """(b, c, …)."""
        return input.dense(shape=self.shape)[0]


class MinkowskiToFeature(MinkowskiModuleBase):
    """Features."""

    def forward(self, x: Any) -> Tensor:
        """(n, c)."""
        assert isinstance(x, (SparseTensor, TensorField)), "Invalid input type"
        return x.F


class MinkowskiStackCat(nn.Sequential):
    """Modules that all take the same, and what they give one after another."""

    def forward(self, x: Any) -> Any:
        """See `cat`."""
        return cat([module(x) for module in self])


class MinkowskiStackSum(nn.Sequential):
    """The sum of what they give."""

    def forward(self, x: Any) -> Any:
        """See `sum`."""
        return _sum([module(x) for module in self])


class MinkowskiStackMean(nn.Sequential):
    """The mean."""

    def forward(self, x: Any) -> Any:
        """See `mean`."""
        return mean([module(x) for module in self])


class MinkowskiStackVar(nn.Sequential):
    """The variance."""

    def forward(self, x: Any) -> Any:
        """See `var`."""
        return var([module(x) for module in self])
