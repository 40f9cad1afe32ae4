"""Sparse tensors."""

import itertools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor as Features

from fuseport.exporter.shims import _lattice, _voxels
from fuseport.exporter.shims.torch_scatter import scatter_mean
from fuseport.exporter.shims.torch_scatter._scatter import sized

from . import MinkowskiTensorField
from .MinkowskiCommon import convert_to_int_list
from .MinkowskiCoordinateManager import CoordinateManager, CoordinateMapKey
from .MinkowskiTensor import (
    COORDINATE_KEY_DIFFERENT_ERROR,
    COORDINATE_MANAGER_DIFFERENT_ERROR,
    SparseTensorQuantizationMode,
    Tensor,
    manager_of,
)

__all__ = ["SparseTensor", "interpolated", "key_of", "quantized"]

_MODES = SparseTensorQuantizationMode


class SparseTensor(Tensor):
    """Features where there are voxels.

    Args:
        features: (n, c).
        coordinates: (n, 1 + d), the batch first; or None, and `coordinate_map_key` and its
            `coordinate_manager`.
        tensor_stride: how far voxels are apart, of which their coordinates are multiples.
        quantization_mode: what becomes of voxels that are alike. Of all modes but NO_QUANTIZATION
            the tensor has one row for each that differs, in the order in which they come; the first
            stands for its like where the package takes any.
        allocator_type, minkowski_algorithm: of no effect.

    Attributes:
        unique_index, inverse_mapping: of coordinates that are given: which rows are kept, and which
            of these each is like.

    Raises:
        ValueError: neither coordinates nor a key and a manager are given.
    """

    unique_index: Features
    inverse_mapping: Features

    def __init__(
        self,
        features: Features,
        coordinates: Features | None = None,
        tensor_stride: Any = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = _MODES.RANDOM_SUBSAMPLE,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
        requires_grad: bool | None = None,
        device: Any = None,
    ) -> None:
        assert isinstance(features, Features), "Features must be a torch.Tensor"
        assert features.ndim == 2, f"The feature should be a matrix, not of order {features.ndim}"
        assert isinstance(quantization_mode, SparseTensorQuantizationMode)
        self.quantization_mode = quantization_mode
        if device is not None:
            features = features.to(device)
        if coordinates is None:
            if coordinate_map_key is None or coordinate_manager is None:
                raise ValueError(
                    "Either coordinates or (coordinate_map_key, coordinate_manager) pair must be "
                    "provided."
                )
            assert coordinate_map_key.is_key_set(), "The coordinate key must be valid."
            self._D = coordinate_manager.D
            self._manager = coordinate_manager
            self.coordinate_map_key = coordinate_map_key
        else:
            assert coordinate_map_key is None, (
                "Must not provide coordinates if coordinate_map_key is provided"
            )
            assert features.shape[0] == coordinates.shape[0], (
                "The number of rows in features and coordinates must match."
            )
            self._D = coordinates.shape[1] - 1
            self._manager = (
                manager_of(self._D) if coordinate_manager is None else coordinate_manager
            )
            features = self._quantized(features, coordinates.to(features.device), tensor_stride)
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self._F = features

    def _quantized(self, features: Features, coordinates: Features, stride: Any) -> Features:
        if coordinates.is_floating_point():
            coordinates = coordinates.floor()
        coordinates = coordinates.int()
        steps = convert_to_int_list(stride, self._D)
        if self.quantization_mode == _MODES.NO_QUANTIZATION:
            self.unique_index = torch.arange(coordinates.shape[0], device=features.device)
            self.inverse_mapping = self.unique_index
            self.coordinate_map_key = self._manager.insert(coordinates, steps)
            return features
        self.coordinate_map_key, maps = self._manager.insert_and_map(coordinates, steps)
        self.unique_index, self.inverse_mapping = maps
        return quantized(features, *maps, self.quantization_mode)

    @property
    def coordinates(self) -> Features:
        """(n, 1 + d), int32."""
        return self._manager.get_coordinates(self.coordinate_map_key)

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        """Its key."""
        return self.coordinate_map_key

    @property
    def tensor_stride(self) -> list[int]:
        """How far voxels are apart."""
        return self.coordinate_map_key.get_tensor_stride()

    def with_features(self, features: Features) -> Self:
        """Others at the same voxels. (Of the stand-in alone.)"""
        return type(self)(
            features,
            coordinate_map_key=self.coordinate_map_key,
            coordinate_manager=self._manager,
        )

    def _is_same_key(self, other: Any) -> None:
        assert isinstance(other, SparseTensor)
        assert self._manager is other._manager, COORDINATE_MANAGER_DIFFERENT_ERROR
        assert self.coordinate_map_key == other.coordinate_map_key, COORDINATE_KEY_DIFFERENT_ERROR

    def __iadd__(self, other: Any) -> Self:
        self._is_same_key(other)
        self._F += other.F
        return self

    def __isub__(self, other: Any) -> Self:
        self._is_same_key(other)
        self._F -= other.F
        return self

    def __imul__(self, other: Any) -> Self:
        self._is_same_key(other)
        self._F *= other.F
        return self

    def __add__(self, other: Any) -> Self:
        return self._with(other, torch.add)

    def __sub__(self, other: Any) -> Self:
        return self._with(other, torch.sub)

    def __mul__(self, other: Any) -> Self:
        return self._with(other, torch.mul)

    def __truediv__(self, other: Any) -> Self:
        return self._with(other, torch.div)

    def _with(self, other: Any, function: Callable[[Any, Any], Features]) -> Self:
        """With a tensor's features, or those of another sparse tensor, 0 where it has no voxel.

        Where the other has none, this one's are left as they are, also of products, as there.
        """
        assert isinstance(other, (SparseTensor, Features))
        if isinstance(other, Features):
            return self.with_features(function(self._F, other))
        assert self._manager is other._manager, COORDINATE_MANAGER_DIFFERENT_ERROR
        if self.coordinate_map_key == other.coordinate_map_key:
            return self.with_features(function(self._F, other.F))
        key = self._manager.merge([self.coordinate_map_key, other.coordinate_map_key])
        rows = [self._manager.at(each.coordinate_map_key, key) for each in (self, other)]
        own, others = _voxels.taken(self._F, rows[0]), _voxels.taken(other.F, rows[1])
        is_there = (rows[1] < other.shape[0])[:, :1]
        features = torch.where(is_there, function(own, others), own)
        return type(self)(features, coordinate_map_key=key, coordinate_manager=self._manager)

    def dense(
        self, shape: Any = None, min_coordinate: Any = None, contract_stride: bool = True
    ) -> tuple[Features, Any, Features]:
        """(b, c, …) with zeros where there are no voxels, where it begins, and the tensor stride.

        Args:
            shape: of it, whose channels are of no effect; None for one that holds all voxels.
            min_coordinate: where it begins, d integers; None for the origin, and then the least
                coordinates of voxels are what is returned, as there.
            contract_stride: whether a step in it is one of the tensor stride.
        """
        coordinates = self.C
        columns = list(coordinates.unbind(1))
        if min_coordinate is None:
            min_coordinate = coordinates[:, 1:].amin(0, keepdim=True)
        elif not isinstance(min_coordinate, int):
            first = min_coordinate.flatten().to(coordinates.device)
            columns[1:] = [x - start for x, start in zip(columns[1:], first.unbind(), strict=True)]
        if contract_stride:
            steps = zip(columns[1:], self.tensor_stride, strict=True)
            columns[1:] = [torch.div(x, step, rounding_mode="floor") for x, step in steps]
        sizes = [sized(x.max() + 1) for x in columns] if shape is None else [shape[0], *shape[2:]]
        volume = self._F.new_zeros((*sizes, self._F.shape[1]))
        volume = volume.index_put([x.long() for x in columns], self._F)
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32)
        return volume.movedim(-1, 1), min_coordinate, stride

    def sparse(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: torch's sparse tensors have no form in programs."""
        raise NotImplementedError(
            "MinkowskiEngine's SparseTensor.sparse was called, which makes a sparse tensor of "
            "torch's, and programs have none: use dense, or C and F"
        )

    def slice(
        self, X: "SparseTensor | MinkowskiTensorField.TensorField"
    ) -> "MinkowskiTensorField.TensorField":
        """Features of each of the points, or rows, that voxels were made of."""
        assert X.quantization_mode in (_MODES.RANDOM_SUBSAMPLE, _MODES.UNWEIGHTED_AVERAGE), (
            "slice only available for sparse tensors with quantization RANDOM_SUBSAMPLE or "
            "UNWEIGHTED_AVERAGE"
        )
        if isinstance(X, MinkowskiTensorField.TensorField):
            return X.with_features(self._F[X.inverse_mapping(self.coordinate_map_key)])
        assert X.coordinate_map_key == self.coordinate_map_key, (
            "Slice can only be applied on the same coordinates (coordinate_map_key)"
        )
        return MinkowskiTensorField.TensorField(
            self._F[X.inverse_mapping],
            coordinates=self.C[X.inverse_mapping],
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )

    def cat_slice(
        self, X: "MinkowskiTensorField.TensorField"
    ) -> "MinkowskiTensorField.TensorField":
        """Those, and beside them the points' own."""
        assert X.quantization_mode in (_MODES.RANDOM_SUBSAMPLE, _MODES.UNWEIGHTED_AVERAGE), (
            "slice only available for sparse tensors with quantization RANDOM_SUBSAMPLE or "
            "UNWEIGHTED_AVERAGE"
        )
        own = self._F[X.inverse_mapping(self.coordinate_map_key)]
        return X.with_features(torch.cat([own, X.F], 1))

    def interpolate(
        self, X: "MinkowskiTensorField.TensorField"
    ) -> "MinkowskiTensorField.TensorField":
        """Features between voxels, at points."""
        return X.with_features(self.features_at_coordinates(X.C))

    def features_at_coordinates(self, query_coordinates: Features) -> Features:
        """Features between voxels, at (p, 1 + d) places; see `MinkowskiInterpolation`."""
        assert self.dtype == query_coordinates.dtype, "Invalid query_coordinates dtype."
        return interpolated(self, query_coordinates)


def quantized(
    features: Features, unique: Features, inverse: Features, mode: SparseTensorQuantizationMode
) -> Features:
    """(m, c): of rows that are alike, (n, c); of modes not named here, those of the first."""
    if mode == _MODES.UNWEIGHTED_SUM:
        return features.new_zeros((unique.shape[0], features.shape[1])).index_add(
            0, inverse, features
        )
    if mode == _MODES.UNWEIGHTED_AVERAGE:
        return scatter_mean(features, inverse, 0, dim_size=unique.shape[0])
    return features[unique]


def interpolated(input: SparseTensor, points: Features) -> Features:
    """(p, c): features, each times how near its voxel is to a point, in each of d dimensions.

    Points have no gradient, as there.
    """
    stride = input.tensor_stride
    points = points.detach()
    cells = _lattice.floored(points, stride)
    corners = [list(c) for c in itertools.product(*((0, step) for step in stride))]
    rows = _lattice.seen(input.C, cells, corners)
    steps = torch.tensor(stride, dtype=points.dtype, device=points.device)
    share = (points[:, 1:] - cells[:, 1:]) / steps
    at = torch.tensor(corners, dtype=points.dtype, device=points.device) / steps
    weights = (1 - (share[:, None] - at).abs()).prod(2)
    found = _voxels.gathered(input.F, rows)
    features: Features = (found * weights.to(found.dtype)[..., None]).sum(1)
    return features


def key_of(input: SparseTensor, coordinates: Any, tensor_stride: Any = 1) -> CoordinateMapKey:
    """The key of coordinates that a layer is told to give its output at."""
    if isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        return coordinates.coordinate_map_key
    assert coordinates.ndim == 2
    return input.coordinate_manager.insert_and_map(coordinates, tensor_stride)[0]
