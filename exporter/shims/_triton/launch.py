"""A launch of a Triton kernel, computed by torch: all programs of the grid at once.

The kernel's own Python function is called, with functions of `language` in the place of Triton's
and blocks of all programs as what these give. Where Python has to know something that differs from
program to program, such as which way an `if` goes, the programs along that axis of the grid run one
after the other, if it is known how many there are. Where a loop goes over a dynamic dimension block
by block, the kernel is computed with one block for all of it.
"""

import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuseport.exporter.program.sizes.numbers import is_number
from fuseport.exporter.shims._triton.blocks import BlockPointer
from fuseport.exporter.shims._triton.memory import Memory, Pointer
from fuseport.exporter.shims._triton.places import Size, is_one, same, strides
from fuseport.exporter.shims._triton.programs import (
    Asked,
    NotUniform,
    Programs,
    Repeats,
    Strides,
    Unknown,
    running,
)
from fuseport.exporter.shims._triton.rewriting import Rewriting, member
from fuseport.exporter.shims._triton.values import NUMBERS, Value

__all__ = ["launched"]

_MOST = 4096
"""Programs that run one after the other."""


def launched(function: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Computes what a launch stores.

    Args:
        function: the kernel, as it is written.
        grid: how many programs there are along up to three axes, or a function that says it of the
            arguments by name.
        args, kwargs: the kernel's arguments; options of the launch, such as `num_warps`, may be
            among them.

    Raises:
        Unknown: something in the kernel has no form in torch.
        IndexError: the kernel reads or writes beside a tensor, where sizes are known.
    """
    signature = inspect.signature(function)
    known = {n: v for n, v in kwargs.items() if n in signature.parameters}
    bound = signature.bind(*args, **known)
    bound.apply_defaults()
    _say_strides(bound.arguments)
    constants = {n for n, p in signature.parameters.items() if _is_constant(p.annotation)}
    _launch(
        _Launch(function, grid, {**kwargs, **bound.arguments}, dict(bound.arguments), constants)
    )


def _say_strides(arguments: dict[str, Any]) -> None:
    """Has numbers that are strides of tensors among the arguments said as those of memory are."""
    known = [
        pair
        for tensor in pytree.tree_leaves(arguments)
        if isinstance(tensor, Tensor)
        for pair in zip(tensor.stride(), strides(tensor), strict=True)
    ]
    for name, value in arguments.items():
        if isinstance(value, torch.SymInt):
            found = (said for stride, said in known if same(stride, value))
            arguments[name] = next(found, value)


@dataclass(frozen=True)
class _Launch:
    """A kernel and its arguments.

    Args:
        function: the kernel.
        grid: as it is given.
        meta: what a function for the grid gets.
        arguments: of the kernel.
        constants: the names of those that it is compiled for.
        loops: over dynamic dimensions, by how far they go and in what steps, for each of which a
            block has been made as large.
        joined: axes of the grid with one program, whose block is as large as those of all were.
        strided: axes of the grid with a program for each turn of a loop that fewer go in strides,
            by how far the loop goes and how many were launched; None where that was of no use.
    """

    function: Any
    grid: Any
    meta: Mapping[str, Any]
    arguments: Mapping[str, Any]
    constants: Collection[str]
    loops: tuple[tuple[Size, Size], ...] = ()
    joined: tuple[int, ...] = ()
    strided: Mapping[int, tuple[Size, Size] | None] = field(default_factory=dict)

    def sizes(self) -> tuple[Size, ...]:
        """How many programs there are along each of three axes."""
        sizes = tuple(self.grid(dict(self.meta)) if callable(self.grid) else self.grid)
        sizes = (*sizes, *[1] * (3 - len(sizes)))
        return tuple((self.strided.get(a) or [n])[0] for a, n in enumerate(sizes))

    def with_strides(self, axis: int, strides: tuple[Size, Size] | None) -> "_Launch":
        """With a program for each turn of a loop along an axis; or not to be tried so again."""
        return replace(self, strided={**self.strided, axis: strides})

    def with_block(self, name: str, size: Size) -> "_Launch":
        """Compiled for another size of block."""
        changed = {name: size}
        return replace(self, meta={**self.meta, **changed}, arguments={**self.arguments, **changed})

    def has_programs_for(self, block: int) -> bool:
        """Whether there are as many programs along an axis as blocks of a size in a dimension, for
        which code has not asked with that size: of another block, they would be as many."""
        if callable(self.grid):
            return False
        many = [-(-size // block) for size in self.dynamic()]
        return any(same(n, count) for n in self.sizes() if not is_one(n) for count in many)

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Constants that may be sizes of blocks."""
        for name in self.arguments:
            value = self.arguments[name]
            if name in self.constants and type(value) is int and value > 1:
                yield name, value

    def dynamic(self) -> list[torch.SymInt]:
        """Arguments that are dynamic sizes."""
        return [value for value in self.arguments.values() if isinstance(value, torch.SymInt)]


def _launch(this: _Launch) -> None:
    sizes = this.sizes()
    if any(isinstance(size, int) and size < 1 for size in sizes):
        return
    for axis, size in enumerate(sizes):
        if not is_one(size) and not isinstance(size, int) and _is_run(_along(this, axis)):
            return
    at_once = [a for a, size in enumerate(sizes) if not is_one(size) or a in this.joined]
    both_ways = False
    while True:
        try:
            _run(this, sizes, at_once, both_ways)
            return
        except Strides as error:
            if _is_run([this.with_strides(error.axis, (error.over, error.step))]):
                return
            this = this.with_strides(error.axis, None)
        except Repeats as error:
            if _is_run(_over(this, error)):
                return
            raise
        except NotUniform as error:
            both_ways |= isinstance(error, Asked)
            for axis in error.axes:
                if not isinstance(sizes[axis], int) or axis in this.joined:
                    raise Unknown(
                        f"{error} differs along axis {axis} of its grid, which is as long as a "
                        "dynamic dimension says: export that dimension with a fixed size"
                    ) from None
                at_once.remove(axis)


def _is_run(others: Iterable[_Launch]) -> bool:
    """Whether one can be run, of kernels with blocks as large as the dynamic dimension they part.

    What a kernel computes depends on the size of a block as little as its author could choose one.
    """
    for other in others:
        try:
            _launch(other)
        except Exception:  # of the kernel, which may take no such block
            continue
        return True
    return False


def _over(this: _Launch, error: Repeats) -> Iterator[_Launch]:
    """With a block for all of what a loop goes over; where one did not change that, with none."""
    if any(same(error.over, over) and same(error.step, step) for over, step in this.loops):
        return
    loops = (*this.loops, (error.over, error.step))
    for name, block in this.blocks():
        if this.has_programs_for(block):
            continue
        if same(block, error.step):
            yield replace(this.with_block(name, error.over), loops=loops)
        for size in this.dynamic() if is_one(error.step) else ():  # it goes from block to block
            if same(error.over, -(-size // block)):
                yield replace(this.with_block(name, size), loops=loops)


def _along(this: _Launch, axis: int) -> Iterator[_Launch]:
    """With one program along an axis of the grid, which has one for each block of a dimension."""
    programs = this.sizes()[axis]
    for name, block in this.blocks():
        for size in this.dynamic():
            other = this.with_block(name, size)
            if same(programs, -(-size // block)) and is_one(other.sizes()[axis]):
                yield replace(other, joined=(*this.joined, axis))


def _run(this: _Launch, grid: tuple[Size, ...], at_once: Sequence[int], both_ways: bool) -> None:
    """Runs all programs, and writes what they stored.

    Args:
        this: what is launched.
        grid: how many programs there are.
        at_once: axes along which they run at once.
        both_ways: whether it has to be the same in the opposite order.
    """
    memories = _computed(this, grid, at_once, 1)
    for memory, other in itertools.permutations(memories, 2):
        if memory.is_stored and memory.may_overlap(other):
            raise Unknown(f"it stores to {memory.name}, which may be a part of {other.name}")
    if both_ways:
        for memory, other in zip(memories, _computed(this, grid, at_once, -1), strict=True):
            memory.require_same(other)
    for memory in memories:
        memory.finish()


def _computed(
    this: _Launch, grid: tuple[Size, ...], at_once: Sequence[int], order: int
) -> list[Memory]:
    """Memory after all programs have run, from the first on or, of `order` -1, from the last on."""
    memories: list[Memory] = []
    rewriting = Rewriting()

    def passed(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and is_number(value):
            return Value(value.reshape([1] * len(at_once)), 0)
        if isinstance(value, Tensor):
            found = next((m for m in memories if m.is_same(value)), None)
            if found is None:
                memories.append(found := Memory(value, name))
            return Pointer(found, Value(0, 0))
        if type(value).__name__ == "TensorDescriptor":
            beside = getattr(value, "padding", "zero")
            sizes = (value.shape, value.strides, value.block_shape)
            return BlockPointer.described(passed(name, value.base), *sizes, beside)
        if isinstance(value, tuple | list):
            return tuple(passed(name, v) for v in value)
        known = name in this.constants or not isinstance(value, NUMBERS)
        return rewriting.resolved(value) if known else Value(value, 0)

    given = {name: passed(name, value) for name, value in this.arguments.items()}
    device = memories[0].tensor.device if memories else torch.device("cpu")
    turns = [range(1) if a in at_once or is_one(n) else range(n) for a, n in enumerate(grid)]
    if (count := math.prod(map(len, turns))) > _MOST:
        raise Unknown(f"its {count} programs go each its own way")
    body = rewriting.function(this.function)
    for here in [*itertools.product(*turns)][::order]:
        these = Programs(grid, tuple(at_once), here, device, member, this.joined, this.strided)
        with running(these), _own_dtypes(device):
            try:
                body(**given)
            except NameError:
                _refuse_ways(these, "what a name stands for that one way gives")
                raise
            if these.gone and any(memory.has_conflicts() for memory in memories):
                _refuse_ways(these, "what some programs store and others read")
    return memories


def _refuse_ways(these: Programs, what: str) -> None:
    """Has programs run one after the other, if they went ways of their own at once."""
    axes = [axis for axis in these.at_once if not is_one(these.grid[axis])]
    if these.gone and axes:
        raise NotUniform(axes, what)


def _own_dtypes(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels compute in the dtypes that they say, also where a model is under autocast."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _is_constant(annotation: Any) -> bool:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "_name", None)
    return str(name or getattr(annotation, "__name__", "")).endswith("constexpr")
