"""Points between voxels."""

from typing import Any, Self

from torch import Tensor as Features

from fuseport.exporter.shims.torch_scatter import scatter_max

from . import MinkowskiSparseTensor
from .MinkowskiCommon import convert_to_int_list
from .MinkowskiCoordinateManager import CoordinateManager, CoordinateMapKey
from .MinkowskiTensor import SparseTensorQuantizationMode, Tensor, manager_of

__all__ = ["TensorField"]

_MODES = SparseTensorQuantizationMode


class TensorField(Tensor):
    """Features at points.

    Args:
        features: (n, c).
        coordinates: (n, 1 + d), the batch first, floats; or None, and `coordinate_field_map_key`
            and its `coordinate_manager`.
        quantization_mode: what becomes of points that are in one voxel.
        allocator_type, minkowski_algorithm: of no effect.

    Raises:
        ValueError: neither coordinates nor a key and a manager are given.
    """

    def __init__(
        self,
        features: Features,
        coordinates: Features | None = None,
        tensor_stride: Any = 1,
        coordinate_field_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = _MODES.UNWEIGHTED_AVERAGE,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
        requires_grad: bool | None = None,
        device: Any = None,
    ) -> None:
        assert isinstance(features, Features), "Features must be a torch.Tensor"
        assert features.ndim == 2, f"The feature should be a matrix, not of order {features.ndim}"
        assert quantization_mode in (
            _MODES.UNWEIGHTED_AVERAGE,
            _MODES.UNWEIGHTED_SUM,
            _MODES.RANDOM_SUBSAMPLE,
            _MODES.MAX_POOL,
        ), "invalid quantization mode"
        self.quantization_mode = quantization_mode
        if device is not None:
            features = features.to(device)
        if coordinates is None:
            if coordinate_field_map_key is None or coordinate_manager is None:
                raise ValueError(
                    "Either coordinates or (coordinate_field_map_key, coordinate_manager) pair "
                    "must be provided."
                )
            self._D = coordinate_manager.D
            self._manager = coordinate_manager
            self.coordinate_field_map_key = coordinate_field_map_key
            self._C = coordinate_manager.get_coordinate_field(coordinate_field_map_key)
        else:
            assert features.shape[0] == coordinates.shape[0], (
                "The number of rows in features and coordinates must match."
            )
            self._D = coordinates.shape[1] - 1
            self._manager = (
                manager_of(self._D) if coordinate_manager is None else coordinate_manager
            )
            self._C = coordinates.to(features.device)
            steps = convert_to_int_list(tensor_stride, self._D)
            self.coordinate_field_map_key = self._manager.insert_field(self._C, steps)
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self._F = features

    @property
    def coordinates(self) -> Features:
        """(n, 1 + d), as it was given."""
        return self._C

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        """Its key."""
        return self.coordinate_field_map_key

    def with_features(self, features: Features) -> Self:
        """Others at the same points. (Of the stand-in alone.)"""
        return type(self)(
            features,
            coordinate_field_map_key=self.coordinate_field_map_key,
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )

    def sparse(
        self,
        tensor_stride: Any = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        quantization_mode: SparseTensorQuantizationMode | None = None,
    ) -> "MinkowskiSparseTensor.SparseTensor":
        """The voxels that points are in, in the order in which they come.

        Raises:
            NotImplementedError: a `coordinate_map_key` is given.
        """
        if coordinate_map_key is not None:
            raise NotImplementedError(
                "MinkowskiEngine's TensorField.sparse was called with a coordinate_map_key, of "
                "which fuseport's stand-in has no form: leave it out"
            )
        mode = self.quantization_mode if quantization_mode is None else quantization_mode
        assert mode != _MODES.SPLAT_LINEAR_INTERPOLATION, "use .splat() for splat quantization."
        key, (unique, inverse) = self._manager.field_to_sparse_insert_and_map(
            self.coordinate_field_map_key, tensor_stride
        )
        if mode == _MODES.MAX_POOL:
            features = scatter_max(self._F, inverse, 0, dim_size=unique.shape[0])[0]
        else:
            features = MinkowskiSparseTensor.quantized(self._F, unique, inverse, mode)
        return MinkowskiSparseTensor.SparseTensor(
            features, coordinate_map_key=key, coordinate_manager=self._manager
        )

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> Features:
        """(n,): the voxel of each point."""
        return self._manager.voxels_of(self.coordinate_field_map_key, sparse_tensor_map_key)

    def splat(self) -> Any:
        """Raises NotImplementedError: it has no form here."""
        raise NotImplementedError(
            "MinkowskiEngine's TensorField.splat was called, of which fuseport's stand-in has no "
            "form: use sparse"
        )
