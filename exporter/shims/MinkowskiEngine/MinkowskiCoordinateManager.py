"""What knows the coordinates of all tensors that belong together, by keys."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _lattice
from fuseport.exporter.shims._placeholder import refusing

from .MinkowskiCommon import RegionType, convert_to_int_list
from .MinkowskiKernelGenerator import KernelGenerator, offsets

__all__ = ["CoordinateManager", "CoordinateMapKey"]

Key = tuple[tuple[int, ...], str]


class CoordinateMapKey:
    """The name of coordinates: their tensor stride and an id.

    Args:
        stride: of each dimension; or a number, d + 1, of a key that is yet to be set.
    """

    def __init__(self, stride: int | Sequence[int], string_id: str = "") -> None:
        self._size = stride if isinstance(stride, int) else len(stride) + 1
        self._key: Key | None = None
        if not isinstance(stride, int):
            self.set_key(stride, string_id)

    def set_key(self, tensor_stride: Sequence[int], string_id: str) -> None:
        """Gives it its name."""
        self._key = (tuple(int(step) for step in tensor_stride), string_id)

    def get_key(self) -> Key:
        """Its tensor stride and id."""
        assert self._key is not None, "Key not set"
        return self._key

    def is_key_set(self) -> bool:
        """Whether it has a name."""
        return self._key is not None

    def get_tensor_stride(self) -> list[int]:
        """How far voxels are apart, in each dimension."""
        return list(self.get_key()[0])

    def get_coordinate_size(self) -> int:
        """1 + d."""
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoordinateMapKey) and self._key == other._key is not None

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        stride, name = self.get_key()
        return f"coordinate map key:{list(stride)}{name and ':' + name}"


class CoordinateManager:
    """Coordinates, (n, 1 + d), int32, by keys, and what layers have found between them.

    Args:
        D: dimensions.
        num_threads, coordinate_map_type, allocator_type, minkowski_algorithm: of no effect.
    """

    def __init__(
        self,
        D: int = 0,
        num_threads: int = -1,
        coordinate_map_type: Any = None,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
    ) -> None:
        if D < 1:
            raise ValueError(f"Invalid rank D > 0, D = {D}.")
        self.D = D
        self.minkowski_algorithm = minkowski_algorithm
        self._coordinates: dict[Key, Tensor] = {}
        self._fields: dict[Key, Tensor] = {}
        self._found: dict[Any, Tensor] = {}
        self._cells: dict[tuple[Key, Key], Tensor] = {}
        self._of_field: dict[tuple[Key, Key], Tensor] = {}

    def insert_and_map(
        self, coordinates: Tensor, tensor_stride: Any = 1, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[Tensor, Tensor]]:
        """A key of those that differ; which these are, (m,), and which each is like, (n,)."""
        unique, inverse = _lattice.distinct(coordinates)
        key = self.insert(coordinates[unique].int(), tensor_stride, string_id)
        return key, (unique, inverse)

    def insert(self, coordinates: Tensor, tensor_stride: Any, name: str = "") -> CoordinateMapKey:
        """A key of coordinates that all differ."""
        stride = convert_to_int_list(tensor_stride, self.D)
        key = self._new_key(stride, name, self._coordinates)
        self._coordinates[key.get_key()] = coordinates
        return key

    def insert_field(
        self, coordinates: Tensor, tensor_stride: Any, string_id: str = ""
    ) -> CoordinateMapKey:
        """A key of coordinates of points."""
        stride = convert_to_int_list(tensor_stride, self.D)
        key = self._new_key(stride, string_id, self._fields)
        self._fields[key.get_key()] = coordinates
        return key

    def field_to_sparse_insert_and_map(
        self, field_map_key: CoordinateMapKey, sparse_tensor_stride: Any, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[Tensor, Tensor]]:
        """A key of the voxels that points are in; the first point of each, the voxel of each."""
        stride = convert_to_int_list(sparse_tensor_stride, self.D)
        field = self._fields[field_map_key.get_key()]
        key, maps = self.insert_and_map(_lattice.floored(field, stride), stride, string_id)
        self._of_field[field_map_key.get_key(), key.get_key()] = maps[1]
        return key, maps

    def voxels_of(self, field_map_key: CoordinateMapKey, key: CoordinateMapKey) -> Tensor:
        """(n,): which voxel each point is in, m if in none."""
        at = (field_map_key.get_key(), key.get_key())
        if at not in self._of_field:
            cells = _lattice.floored(self._fields[at[0]], at[1][0])
            self._of_field[at] = _lattice.seen(self._coordinates[at[1]], cells, self._own())[:, 0]
        return self._of_field[at]

    def stride(
        self, coordinate_map_key: CoordinateMapKey, stride: Any, string_id: str = ""
    ) -> CoordinateMapKey:
        """The key of the cells that voxels are in; there may be some of that stride already."""
        before, name = coordinate_map_key.get_key()
        steps = convert_to_int_list(stride, self.D)
        wanted = [step * by for step, by in zip(before, steps, strict=True)]
        key = CoordinateMapKey(wanted, string_id or name)
        if key.get_key() not in self._coordinates:
            cells = _lattice.floored(self.get_coordinates(coordinate_map_key), wanted)
            unique, inverse = _lattice.distinct(cells)
            self._coordinates[key.get_key()] = cells[unique]
            self._cells[coordinate_map_key.get_key(), key.get_key()] = inverse
        return key

    def stride_region(
        self, key: CoordinateMapKey, window: KernelGenerator, is_transpose: bool
    ) -> CoordinateMapKey:
        """The key of all voxels that windows reach.

        Those of a transposed layer are taken of what there is already, unless the layer expands.
        """
        before = key.get_tensor_stride()
        strides = list(zip(before, window.kernel_stride, strict=True))
        if is_transpose:
            assert not any(step % by for step, by in strides), (
                f"Invalid up stride on tensor stride: {before} kernel stride: "
                f"{window.kernel_stride}"
            )
        after = [step // by if is_transpose else step * by for step, by in strides]
        known = CoordinateMapKey(after)
        if known.get_key() in self._coordinates and not window.expand_coordinates:
            return known
        steps = offsets(window, after if is_transpose else before)
        rows = self.get_coordinates(key)
        moves = torch.tensor([[0, *step] for step in steps], dtype=rows.dtype, device=rows.device)
        reached = (rows[:, None] + moves).flatten(0, 1)
        if not is_transpose and after != before:
            reached = reached[(reached == _lattice.floored(reached, after)).all(1)]
        return self.insert(reached[_lattice.distinct(reached)[0]], after)

    def merge(self, keys: Sequence[CoordinateMapKey]) -> CoordinateMapKey:
        """The key of all voxels of several keys."""
        every = torch.cat([self.get_coordinates(key) for key in keys])
        strides = zip(*(key.get_tensor_stride() for key in keys), strict=True)
        return self.insert(every[_lattice.distinct(every)[0]], list(map(min, strides)), "merge-0")

    def prune(self, key: CoordinateMapKey, keep: Tensor) -> CoordinateMapKey:
        """The key of voxels that a mask, (n,), keeps."""
        return self.insert(self.get_coordinates(key)[keep], key.get_tensor_stride(), "pruned")

    def rows(
        self,
        in_key: CoordinateMapKey,
        out_key: CoordinateMapKey,
        window: KernelGenerator,
        is_transpose: bool = False,
    ) -> Tensor:
        """(m, K): which of n voxels each place of m windows has in it, n where there is none."""
        geometry = (window.kernel_size, window.kernel_dilation, window.region_type, is_transpose)
        at = (in_key.get_key(), out_key.get_key(), str(geometry))
        if at not in self._found:
            steps = offsets(window, (out_key if is_transpose else in_key).get_tensor_stride())
            if is_transpose:
                steps = [[-x for x in step] for step in steps]
            of, to = self.get_coordinates(in_key), self.get_coordinates(out_key)
            self._found[at] = _lattice.seen(of, to, steps)
        return self._found[at]

    def kernel_map(
        self,
        in_key: Any,
        out_key: Any,
        stride: Any = 1,
        kernel_size: Any = 3,
        dilation: Any = 1,
        region_type: Any = RegionType.HYPER_CUBE,
        region_offset: Any = None,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, Tensor]:
        """(2, n), int32, for each place of a window: rows of voxels in, and of those out, in order.

        There a place has no entry that has none; here it has an empty one.
        """
        source, target = self._key(in_key), self._key(out_key)
        window = KernelGenerator(
            kernel_size, stride, dilation, region_type=RegionType(region_type), dimension=self.D
        )
        if is_pool and window.kernel_size == window.kernel_stride:
            fine, coarse = (target, source) if is_transpose else (source, target)
            both = torch.stack(self.stride_map(fine, coarse)).int()
            return {0: both.flip(0) if is_transpose else both}
        rows, found = self.rows(source, target, window, is_transpose), {}
        for place, column in enumerate(rows.unbind(1)):
            out = (column < self.size(source)).nonzero().squeeze(1)
            found[place] = torch.stack([column[out], out]).int()
        return found

    get_kernel_map = kernel_map

    def stride_map(
        self, in_key: CoordinateMapKey, stride_key: CoordinateMapKey
    ) -> tuple[Tensor, Tensor]:
        """Rows of voxels, (n,), and of the cell that each is in."""
        cells = self.cells(in_key, stride_key)
        return torch.arange(cells.shape[0], device=cells.device), cells

    def union_map(
        self, in_keys: Sequence[CoordinateMapKey], out_key: CoordinateMapKey
    ) -> list[Tensor]:
        """(2, n) for each key: rows of its voxels, and of those of all, of which `out_key` is."""
        merged = self.merge(in_keys)
        out_key.set_key(*merged.get_key())
        rows = [self.at(merged, key)[:, 0] for key in in_keys]
        return [torch.stack([torch.arange(len(row), device=row.device), row]) for row in rows]

    def at(self, in_key: CoordinateMapKey, out_key: CoordinateMapKey) -> Tensor:
        """(m, 1): which of n voxels lies where each of m others does, n where there is none."""
        of, to = self.get_coordinates(in_key), self.get_coordinates(out_key)
        return _lattice.seen(of, to, self._own())

    def cells(self, key: CoordinateMapKey, stride_key: CoordinateMapKey) -> Tensor:
        """(n,): which of m cells each voxel is in, m if in none."""
        at = (key.get_key(), stride_key.get_key())
        if at not in self._cells:
            places = _lattice.floored(self.get_coordinates(key), stride_key.get_tensor_stride())
            cells = self.get_coordinates(stride_key)
            self._cells[at] = _lattice.seen(cells, places, self._own())[:, 0]
        return self._cells[at]

    def origin(self) -> CoordinateMapKey:
        """The key of one place for each batch, in order."""
        key = CoordinateMapKey([0] * self.D)
        if key.get_key() not in self._coordinates:
            rows = next(iter((self._coordinates or self._fields).values()))
            numbers = _lattice.batches(_lattice.floored(rows[:, :1], ())[:, 0])
            zeros = numbers.new_zeros((numbers.shape[0], self.D))
            self._coordinates[key.get_key()] = torch.cat([numbers[:, None], zeros], 1)
        return key

    def batch_rows(self, key: CoordinateMapKey, is_field: bool = False) -> Tensor:
        """(n,): which row of the origin's each voxel, or point, belongs to."""
        of = self._coordinates[self.origin().get_key()][:, 0].contiguous()
        rows = self._fields[key.get_key()] if is_field else self.get_coordinates(key)
        return torch.searchsorted(of, _lattice.floored(rows[:, :1], ())[:, 0])

    def size(self, coordinate_map_key: CoordinateMapKey) -> Any:
        """How many voxels there are."""
        return self.get_coordinates(coordinate_map_key).shape[0]

    def number_of_unique_batch_indices(self) -> Any:
        """How many batches there are."""
        return self.size(self.origin())

    def get_coordinates(self, coords_key_or_tensor_strides: Any) -> Tensor:
        """(n, 1 + d), of a key or a tensor stride."""
        return self._coordinates[self._key(coords_key_or_tensor_strides).get_key()]

    def get_coordinate_field(self, key: CoordinateMapKey) -> Tensor:
        """(n, 1 + d), of points."""
        return self._fields[key.get_key()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return refusing(
            type(self).__name__,
            name,
            f"MinkowskiEngine's CoordinateManager.{name} was called, of which fuseport's stand-in "
            "has no form: use MinkowskiEngine's layers",
        )

    def _key(self, key_or_tensor_strides: Any) -> CoordinateMapKey:
        if isinstance(key_or_tensor_strides, CoordinateMapKey):
            return key_or_tensor_strides
        stride = tuple(convert_to_int_list(key_or_tensor_strides, self.D))
        names = [name for name in self._coordinates if name[0] == stride]
        assert names, f"there are no coordinates of tensor stride {list(stride)}"
        return CoordinateMapKey(*names[0])

    def _own(self) -> list[list[int]]:
        return [[0] * self.D]

    def _new_key(
        self, stride: Sequence[int], name: str, known: dict[Key, Tensor]
    ) -> CoordinateMapKey:
        """A key that there is not yet; its id is random there."""
        key, tried = CoordinateMapKey(stride, name), 0
        while key.get_key() in known:
            tried += 1
            key = CoordinateMapKey(stride, f"{name}-{tried}" if name else str(tried))
        return key
