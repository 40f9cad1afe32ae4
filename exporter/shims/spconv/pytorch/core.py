"""Sparse tensors, and what layers leave in them for those that come after."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import SymInt, Tensor

from fuseport.exporter.shims import _voxels

from ..core import ConvAlgo

__all__ = ["ImplicitGemmIndiceData", "IndiceData", "SparseConvTensor", "expand_nd"]


@dataclass(frozen=True)
class IndiceData:
    """The places of a layer with an `indice_key`.

    Attributes:
        out_indices, indices: voxels after it, (m, 1 + d), and before it, (n, 1 + d), int32.
        spatial_shape, out_spatial_shape: of the volumes they are in.
        is_subm: whether both are the same.
        rows: which of n each place of m windows has in it, (m, K); n where there is none.
        geometry: of its window, from what it sees to what it makes.
        seen: of a layer that makes voxels: by which place each voxel is seen at each place of a
            window, (n, K), and the places there are; see `_voxels.reached`, `_voxels.occupied`.
    """

    out_indices: Tensor
    indices: Tensor
    spatial_shape: list[Any]
    out_spatial_shape: list[Any]
    is_subm: bool
    algo: ConvAlgo
    rows: Tensor
    geometry: _voxels.Geometry
    seen: tuple[Tensor, Tensor] | None = None

    @property
    def ksize(self) -> list[int]:
        """The window's size."""
        return list(self.geometry.size)

    @property
    def stride(self) -> list[int]:
        """Its stride."""
        return list(self.geometry.stride)

    @property
    def padding(self) -> list[int]:
        """Its padding."""
        return list(self.geometry.padding)

    @property
    def dilation(self) -> list[int]:
        """Its dilation."""
        return list(self.geometry.dilation)


ImplicitGemmIndiceData = IndiceData


class SparseConvTensor:
    """Features where there are voxels.

    Args:
        features: (n, c).
        indices: (n, 1 + d), int32, the batch first.
        spatial_shape: the volume's d sizes.
        batch_size: how many volumes there are.
        grid, voxel_num, benchmark, permanent_thrust_allocator, enable_timer, force_algo: kept, and
            of no effect.
        indice_dict: what layers have left, by key.
    """

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[Any],
        batch_size: Any,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[Any, IndiceData] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        assert features.ndim == 2
        assert indices.ndim == 2
        assert len(spatial_shape) == indices.shape[1] - 1, "spatial shape must equal to ndim"
        assert indices.dtype == torch.int32, "only support int32"
        assert isinstance(batch_size, SymInt) or batch_size > 0
        self._features = features
        self.indices = indices
        self.spatial_shape = [
            size if isinstance(size, SymInt) else int(size) for size in spatial_shape
        ]
        self.batch_size = batch_size
        self.indice_dict = {} if indice_dict is None else indice_dict
        self.grid = torch.empty(0) if grid is None else grid
        self.voxel_num = voxel_num
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.thrust_allocator: Any = None
        self._timer: Any = None
        self.force_algo = force_algo
        self.int8_scale: Any = None

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"

    @property
    def features(self) -> Tensor:
        """(n, c); others make another tensor, `replace_feature`."""
        return self._features

    @features.setter
    def features(self, value: Tensor) -> None:
        raise ValueError(
            "you can't set feature directly, use 'x = x.replace_feature(your_new_feature)' to "
            "generate new SparseConvTensor instead."
        )

    @property
    def is_quantized(self) -> bool:
        """Of eight bits, which has no form here."""
        return False

    @property
    def spatial_size(self) -> Any:
        """How many places the volume has."""
        return math.prod(self.spatial_shape)

    def replace_feature(self, feature: Tensor) -> "SparseConvTensor":
        """The same voxels with features (n, c')."""
        found = SparseConvTensor(
            feature,
            self.indices,
            self.spatial_shape,
            self.batch_size,
            self.grid,
            self.voxel_num,
            self.indice_dict,
            self.benchmark,
            force_algo=self.force_algo,
        )
        found.benchmark_record = self.benchmark_record
        found.thrust_allocator = self.thrust_allocator
        found._timer = self._timer
        found.int8_scale = self.int8_scale
        return found

    def shadow_copy(self) -> "SparseConvTensor":
        """Another tensor of the same."""
        return self.replace_feature(self._features)

    def select_by_index(self, valid_indices: Tensor) -> "SparseConvTensor":
        """Some of its voxels, by a mask or index, and nothing that layers have left."""
        found = self.replace_feature(self._features[valid_indices])
        found.indices = self.indices[valid_indices]
        found.indice_dict = {}
        return found

    def minus(self) -> "SparseConvTensor":
        """Its features, negative."""
        return self.replace_feature(-self._features)

    def find_indice_pair(self, key: Any) -> IndiceData | None:
        """What a layer of that key has left."""
        return None if key is None else self.indice_dict.get(key)

    def dense(self, channels_first: bool = True) -> Tensor:
        """(batch, c, …), or (batch, …, c), with zeros where there are no voxels."""
        volume = _voxels.densified(
            self._features, self.indices, self.spatial_shape, self.batch_size
        )
        return volume.movedim(-1, 1).contiguous() if channels_first else volume

    @classmethod
    def from_dense(cls, x: Tensor) -> Self:
        """Voxels where x, (batch, …, c), has a channel that is not 0."""
        places = (x != 0).any(-1).nonzero()
        return cls(x[places.unbind(1)], places.int(), x.shape[1:-1], x.shape[0])

    def __add__(self, other: "SparseConvTensor | Tensor") -> "SparseConvTensor":
        return self.replace_feature(self._features + _features(other))

    __radd__ = __add__


def _features(of: SparseConvTensor | Tensor) -> Tensor:
    return of if isinstance(of, Tensor) else of.features


def expand_nd(ndim: int, val: Any) -> list[int]:
    """`val`, a number or several, as one for each dimension."""
    found = [val] * ndim if isinstance(val, int) else list(val)
    assert len(found) == ndim
    return [int(value) for value in found]
