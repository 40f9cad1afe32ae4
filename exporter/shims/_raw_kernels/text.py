"""The text of a CUDA kernel, as Python code that computes what it does, thread after thread.

For small arrays: a text is run to learn what it computes, not to compute by it. What is understood
is the C that such kernels are written in, without types of their own; all else is refused.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from fuseport.exporter.shims._raw_kernels.parser import NotUnderstood, translated

__all__ = ["Pointer", "launch"]


class Pointer:
    """Where in an array: what is before and behind it cannot be read or written.

    Args:
        values: of the array.
        first: the place of the first one that the pointer means.
        kind: what a kernel has to take them for, such as `float`; nothing, and it may be anything.
    """

    __slots__ = ("_first", "_values", "kind")

    def __init__(self, values: list[Any], first: int = 0, kind: str = "") -> None:
        self._values, self._first, self.kind = values, first, kind

    def __getitem__(self, index: int) -> Any:
        return self._values[self._place(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        self._values[self._place(index)] = value

    def __add__(self, count: int) -> "Pointer":
        return Pointer(self._values, self._first + count)

    def _place(self, index: int) -> int:
        place = self._first + index
        if not 0 <= place < len(self._values):
            raise NotUnderstood(f"it asks for element {place} of {len(self._values)}")
        return place


def launch(
    text: str,
    name: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared: int,
) -> None:
    """Runs a kernel: blocks one after another, the threads of each from barrier to barrier.

    Args:
        text: the source.
        name: of the kernel.
        grid: the numbers of blocks, up to three.
        block: those of threads of a block.
        args: numbers, pointers and None.
        shared: bytes of shared memory whose size the text leaves open.

    Raises:
        NotUnderstood: see there.
    """
    kernel, types = _compiled(text, name)
    if len(types) != len(args):
        raise NotUnderstood(f"it takes {len(types)} arguments, and was given {len(args)}")
    given = [_argument(kind, value) for kind, value in zip(types, args, strict=True)]
    blocks, block_size = _three(grid), _three(block)
    for place in product(*map(range, reversed(blocks))):
        memory: dict[str, Any] = {"": Pointer([0] * shared)}
        threads = [
            kernel(_Built(place[::-1], thread[::-1], blocks, block_size, memory), *given)
            for thread in product(*map(range, reversed(block_size)))
        ]
        while threads:
            threads = [thread for thread in threads if next(thread, _ENDED) is not _ENDED]


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*(int(size) for size in sizes), 1, 1)[:3]


_ENDED = object()


def _argument(kind: str, value: Any) -> Any:
    """A value as a parameter of that type has it."""
    is_pointer = isinstance(value, Pointer)
    if kind.endswith("*") != (value is None or is_pointer):
        raise NotUnderstood(f"a parameter is {kind}, and was given {type(value).__name__}")
    if is_pointer and value.kind and kind != f"{value.kind} *":
        raise NotUnderstood(f"a parameter is {kind}, and was given {value.kind} *")
    if value is None or is_pointer:
        return value
    return float(value) if kind in ("float", "double") else int(value)


class _Built:
    """What a thread knows of itself, and the memory that its block shares."""

    def __init__(
        self,
        block: Sequence[int],
        thread: Sequence[int],
        grid_size: Sequence[int],
        block_size: Sequence[int],
        memory: dict[str, Any],
    ) -> None:
        self.blockIdx, self.threadIdx = _Place(block), _Place(thread)
        self.gridDim, self.blockDim = _Place(grid_size), _Place(block_size)
        self._memory = memory

    def shared(self, name: str, size: int | None, zero: Any) -> Pointer:
        if size is None:
            found: Pointer = self._memory[""]
            return found
        kept: Pointer = self._memory.setdefault(name, Pointer([zero] * size))
        return kept


class _Place:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.x, self.y, self.z = sizes


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a / b


def _remainder(a: int, b: int) -> int:
    return a - b * int(_divided(a, b))


def _add(pointer: Pointer, value: Any) -> Any:
    before = pointer[0]
    pointer[0] = before + value
    return before


def _asserted(said: Any) -> None:
    if not said:
        raise NotUnderstood("it asserts what does not hold")


# By the names in C; those of float, `floorf`, are found without their last letter.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "_divided": _divided,
    "_remainder": _remainder,
    "_list": lambda size, zero: Pointer([zero] * size),
    "abs": abs,
    "assert": _asserted,
    "atomicAdd": _add,
    "ceil": lambda x: float(math.ceil(x)),
    "exp": math.exp,
    "fabs": abs,
    "floor": lambda x: float(math.floor(x)),
    "fmax": max,
    "fmin": min,
    "isfinite": math.isfinite,
    "log": math.log,
    "max": max,
    "min": min,
    "pow": math.pow,
    "sqrt": math.sqrt,
}


@lru_cache(maxsize=64)
def _compiled(text: str, name: str) -> tuple[Any, tuple[str, ...]]:
    """The kernel as a generator function that yields at barriers; the types of its parameters."""
    code, kernels = translated(text, _FUNCTIONS)
    if name not in kernels:
        raise NotUnderstood(f"there is no __global__ {name} in it")
    names: dict[str, Any] = {f"c_{name}": function for name, function in _FUNCTIONS.items()}
    exec(compile(code, f"<kernel {name}>", "exec"), names)
    return names[f"k_{name}"], kernels[name]
