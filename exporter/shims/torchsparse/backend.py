"""What code calls of the extension: its table of coordinates. Other names may be imported."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _lattice
from fuseport.exporter.shims._placeholder import refusing

from ._hashed import found

__all__ = ["GPUHashTable"]


class GPUHashTable:
    """Rows by what they are: of coordinates (x, y, z, batch), or of hashes.

    Args:
        args: memory for it, or how much of it; of no effect.
    """

    def __init__(self, *args: Any) -> None:
        self._known: Tensor | None = None

    def insert_coords(self, coords: Tensor) -> None:
        """Of rows that differ, (n, 4), int32."""
        self._known = coords[:, [3, 0, 1, 2]]

    def lookup_coords(
        self, coords: Tensor, kernel_sizes: Tensor, tensor_strides: Tensor, kernel_volume: int
    ) -> Tensor:
        """(m, K), int32: the row at each place of windows at (m, 4), and one; 0 where is none.

        Odd sizes are centred, and those of even volume begin half a size, less one, before. Rows
        are not filled up to a multiple of 128, as they are there.
        """
        assert self._known is not None, "insert_coords first"
        size, stride = _numbers(kernel_sizes), _numbers(tensor_strides)
        cells = coords[:, [3, 0, 1, 2]]
        if stride != [1, 1, 1]:
            cells = cells * cells.new_tensor([1, *stride])
        rows = _lattice.seen(self._known, cells, places(size))
        return ((rows + 1) % (self._known.shape[0] + 1)).int()

    def insert_vals(self, keys: Tensor) -> None:
        """Of hashes that differ, (n,)."""
        self._known = keys

    def lookup_vals(self, keys: Tensor) -> Tensor:
        """(m,), int32: the row of each hash, and one; 0 where there is none."""
        assert self._known is not None, "insert_vals first"
        return found(keys, self._known) + 1


def places(size: Sequence[int]) -> list[list[int]]:
    """Where a window's places are, in the order of the extension.

    That of an odd number of places changes along the first axis first, that of an even number along
    the last (`lookup_coords_kernel` in torchsparse's backend/hashmap/hashmap_cuda.cuh).
    """
    ranges = [range(-((k - 1) // 2), k - (k - 1) // 2) for k in size]
    if size[0] * size[1] * size[2] % 2:
        return [list(place[::-1]) for place in itertools.product(*ranges[::-1])]
    return [list(place) for place in itertools.product(*ranges)]


def _numbers(of: Any) -> list[int]:
    return [int(value) for value in (of.tolist() if isinstance(of, Tensor) else of)]


def __getattr__(name: str) -> Any:
    return refusing(
        __name__,
        name,
        f"torchsparse.backend.{name} was called, of which fuseport's stand-in has no form: use "
        "torchsparse's layers and functions",
    )
