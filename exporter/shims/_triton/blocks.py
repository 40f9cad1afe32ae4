"""Pointers to a block of a tensor of several dimensions: `make_block_ptr`, and descriptors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims._triton.dtypes import DType
from fuseport.exporter.shims._triton.memory import Pointer
from fuseport.exporter.shims._triton.places import Linear
from fuseport.exporter.shims._triton.programs import Unknown, programs
from fuseport.exporter.shims._triton.shapes import size_of
from fuseport.exporter.shims._triton.values import Value, as_value, binary

__all__ = ["BlockPointer"]


@dataclass(frozen=True, eq=False)
class BlockPointer:
    """Where a block of a tensor begins.

    Args:
        base: the tensor's first element.
        sizes: of the tensor, one number per dimension.
        strides: of it, in elements.
        offsets: where the block begins, per dimension.
        block: its sizes.
    """

    base: Pointer
    sizes: tuple[Value, ...]
    strides: tuple[Value, ...]
    offsets: tuple[Value, ...]
    block: tuple[Any, ...]

    @classmethod
    def made(
        cls,
        base: Pointer,
        shape: Sequence[Any],
        strides: Sequence[Any],
        offsets: Sequence[Any],
        block_shape: Sequence[Any],
        order: Any = None,
        **by: Any,
    ) -> "BlockPointer":
        """As `make_block_ptr` takes it."""
        sizes, steps, places = (tuple(map(as_value, each)) for each in (shape, strides, offsets))
        return cls(base, sizes, steps, places, tuple(map(size_of, block_shape)))

    @classmethod
    def described(
        cls,
        base: Pointer,
        shape: Sequence[Any],
        strides: Sequence[Any],
        block_shape: Sequence[Any],
        padding_option: Any = "zero",
        **by: Any,
    ) -> "BlockPointer":
        """As `make_tensor_descriptor` takes it, at the tensor's first element."""
        if padding_option != "zero":
            raise Unknown(f"a tensor descriptor with {padding_option} beside the tensor")
        return cls.made(base, shape, strides, [0] * len(shape), block_shape)

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        return self.base.dtype

    type = dtype

    def advanced(self, offsets: Sequence[Any]) -> "BlockPointer":
        """Moved by some places per dimension."""
        moved = map(binary, ["add"] * len(self.offsets), self.offsets, offsets)
        return replace(self, offsets=tuple(moved))

    def pointers(self, checked: Sequence[Any]) -> tuple[Pointer, Value | None]:
        """A pointer to each element.

        Args:
            checked: dimensions in which the block may be beside the tensor.

        Returns:
            The pointers, and where the tensor has such elements; None where that is not asked.
        """
        axes, rank = len(programs().at_once), len(self.block)
        at, mask = self.base.at.at_rank(rank), None
        for dim, size in enumerate(self.block):
            steps = [int(i == axes + dim) for i in range(axes + rank)]
            sizes = [size if step else 1 for step in steps]
            within = Value(Linear(0, tuple(steps), tuple(sizes)), rank)
            place = binary("add", self.offsets[dim].at_rank(rank), within)
            at = binary("add", at, binary("mul", place, self.strides[dim]))
            if dim in [int(d) for d in checked]:
                for limit in _limits(place, self.sizes[dim]):
                    mask = limit if mask is None else binary("and", mask, limit)
        return Pointer(self.base.memory, at), mask

    def load(self, offsets: Sequence[Any], **by: Any) -> Value:
        """The block at some place of the tensor, zeros beside it."""
        pointer, mask = self.advanced(offsets).pointers(range(len(self.block)))
        return pointer.memory.load(pointer.at, mask, None)

    def store(self, offsets: Sequence[Any], value: Value, **by: Any) -> None:
        """Writes a block to some place of the tensor, without what is beside it."""
        pointer, mask = self.advanced(offsets).pointers(range(len(self.block)))
        pointer.memory.store(pointer.at, value, mask)


def _limits(place: Value, size: Value) -> list[Value]:
    linear = place.linear
    below = binary("lt", place, size)
    if linear is not None and always(linear.first() >= 0):
        return [below]
    return [below, binary("ge", place, 0)]
