"""Sparse tensors, and what layers leave in them for those that come after."""

from typing import Any, Self

from torch import Tensor

from .utils._dense import to_dense
from .utils.tensor_cache import (
    TensorCache,
    TensorCacheMode,
    get_global_tensor_cache,
    get_tensor_cache_mode,
    set_global_tensor_cache,
)
from .utils.utils import make_ntuple

__all__ = [
    "PointTensor",
    "SparseTensor",
    "get_allow_negative_coordinates",
    "set_allow_negative_coordinates",
]


def get_allow_negative_coordinates() -> bool:
    """False."""
    return False


def set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    """Raises NotImplementedError if they are to be allowed."""
    if allow_negative_coordinates:
        raise NotImplementedError(
            "torchsparse was told to allow negative coordinates, of which fuseport's stand-in has "
            "no form: move them to where none is negative"
        )


class SparseTensor:
    """Features where there are voxels.

    Args:
        feats: (n, c).
        coords: (n, 4), int32, the batch first, in steps of the stride.
        stride: how far voxels are apart.
        spatial_range: of the volume, its batches first; None for the largest coordinates.
    """

    def __init__(
        self, feats: Tensor, coords: Tensor, stride: Any = 1, spatial_range: Any = None
    ) -> None:
        self.feats = feats
        self.coords = coords
        self.stride = make_ntuple(stride, ndim=3)
        self.spatial_range = None if spatial_range is None else tuple(spatial_range)
        self._caches = _cache()

    @property
    def F(self) -> Tensor:  # noqa: N802  # as there
        """(n, c)."""
        return self.feats

    @F.setter
    def F(self, feats: Tensor) -> None:  # noqa: N802
        self.feats = feats

    @property
    def C(self) -> Tensor:  # noqa: N802
        """(n, 4)."""
        return self.coords

    @C.setter
    def C(self, coords: Tensor) -> None:  # noqa: N802
        self.coords = coords

    @property
    def s(self) -> tuple[int, ...]:
        """Its stride."""
        return self.stride

    @s.setter
    def s(self, stride: Any) -> None:
        self.stride = make_ntuple(stride, ndim=3)

    def cpu(self) -> Self:
        """On the CPU."""
        return self.to("cpu")

    def cuda(self) -> Self:
        """On a GPU."""
        return self.to("cuda")

    def half(self) -> Self:
        """Features as float16."""
        self.feats = self.feats.half()
        return self

    def detach(self) -> Self:
        """Without gradients."""
        self.coords, self.feats = self.coords.detach(), self.feats.detach()
        return self

    def to(self, device: Any, non_blocking: bool = True) -> Self:
        """On a device."""
        self.coords = self.coords.to(device, non_blocking=non_blocking)
        self.feats = self.feats.to(device, non_blocking=non_blocking)
        return self

    def dense(self) -> Tensor:
        """(batch, x, y, z, c), of its `spatial_range`."""
        assert self.spatial_range is not None
        return to_dense(self.feats, self.coords, self.spatial_range)

    def with_features(self, feats: Tensor) -> "SparseTensor":
        """Others at the same voxels. (Of the stand-in alone.)"""
        output = SparseTensor(feats, self.coords, self.stride, self.spatial_range)
        output._caches = self._caches
        return output

    def __add__(self, other: "SparseTensor") -> "SparseTensor":
        return self.with_features(self.feats + other.feats)


class PointTensor:
    """Features at points, and what functions leave in it."""

    def __init__(
        self, feats: Tensor, coords: Tensor, idx_query: Any = None, weights: Any = None
    ) -> None:
        self.F = feats
        self.C = coords
        self.idx_query = {} if idx_query is None else idx_query
        self.weights = {} if weights is None else weights
        self.additional_features: dict[str, Any] = {"idx_query": {}, "counts": {}}

    def cuda(self) -> Self:
        """On a GPU."""
        return self.to("cuda")

    def detach(self) -> Self:
        """Without gradients."""
        self.F, self.C = self.F.detach(), self.C.detach()
        return self

    def to(self, device: Any, non_blocking: bool = True) -> Self:
        """On a device."""
        self.F = self.F.to(device, non_blocking=non_blocking)
        self.C = self.C.to(device, non_blocking=non_blocking)
        return self

    def __add__(self, other: "PointTensor") -> "PointTensor":
        tensor = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        tensor.additional_features = self.additional_features
        return tensor


def _cache() -> TensorCache:
    if get_tensor_cache_mode() != TensorCacheMode.GLOBAL_TENSOR_CACHE:
        return TensorCache()
    cache = get_global_tensor_cache()
    if cache is None:
        cache = TensorCache()
        set_global_tensor_cache(cache)
    return cache
