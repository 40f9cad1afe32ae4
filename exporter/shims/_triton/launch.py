"""A launch of a Triton kernel, computed by torch: all programs of the grid at once.

The kernel's own Python function is called, with functions of `language` in the place of Triton's
and blocks of all programs as what these give. Where Python has to know something that differs from
program to program, such as which way an `if` goes, the programs along that axis of the grid run one
after the other, if it is known how many there are.
"""

import builtins
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.dtypes import as_dtype
from fuseport.exporter.shims._triton.language import LANGUAGE, extreme, numbers
from fuseport.exporter.shims._triton.memory import Memory, Pointer
from fuseport.exporter.shims._triton.places import Size, is_one
from fuseport.exporter.shims._triton.values import (
    NUMBERS,
    NotUniform,
    Programs,
    Unknown,
    Value,
    running,
)

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
    sizes = tuple(grid({**kwargs, **bound.arguments}) if callable(grid) else grid)
    sizes = tuple(_plain(size) for size in (*sizes, *[1] * (3 - len(sizes))))
    if any(isinstance(size, int) and size < 1 for size in sizes):
        return
    constants = {n for n, p in signature.parameters.items() if _is_constant(p.annotation)}
    at_once = [axis for axis, size in enumerate(sizes) if not is_one(size)]
    while True:
        try:
            _run(function, sizes, at_once, bound.arguments, constants)
            return
        except NotUniform as error:
            for axis in error.axes:
                if not isinstance(sizes[axis], int):
                    raise Unknown(
                        f"{error} differs along axis {axis} of its grid, which is as long as a "
                        "dynamic dimension says: export that dimension with a fixed size"
                    ) from None
                at_once.remove(axis)


def _run(
    function: Any,
    grid: tuple[Size, Size, Size],
    at_once: Sequence[int],
    arguments: Mapping[str, Any],
    constants: set[str],
) -> None:
    """Runs all programs, and writes what they stored."""
    memories: list[Memory] = []
    rewriting = _Rewriting()

    def passed(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            found = next((m for m in memories if m.is_same(value)), None)
            if found is None:
                memories.append(found := Memory(value, name))
            return Pointer(found, Value(0, 0))
        if isinstance(value, tuple | list):
            return tuple(passed(name, v) for v in value)
        known = name in constants or not isinstance(value, NUMBERS)
        return rewriting.resolved(value) if known else Value(value, 0)

    given = {name: passed(name, value) for name, value in arguments.items()}
    device = memories[0].tensor.device if memories else torch.device("cpu")
    turns = [range(1) if a in at_once or is_one(n) else range(n) for a, n in enumerate(grid)]
    if (count := math.prod(map(len, turns))) > _MOST:
        raise Unknown(f"its {count} programs go each its own way")
    body = rewriting.function(function)
    for here in itertools.product(*turns):
        with running(Programs(grid, tuple(at_once), here, device, member)), _own_dtypes(device):
            body(**given)
    for memory, other in itertools.permutations(memories, 2):
        if memory.is_stored and memory.may_overlap(other):
            raise Unknown(f"it stores to {memory.name}, which may be a part of {other.name}")
    for memory in memories:
        memory.finish()


def _own_dtypes(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels compute in the dtypes that they say, also where a model is under autocast."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _plain(size: Any) -> Any:
    return size.number if isinstance(size, Value) else size


def _is_constant(annotation: Any) -> bool:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "_name", None)
    return str(name or getattr(annotation, "__name__", "")).endswith("constexpr")


def member(name: str) -> Any:
    """A function that a block has as its method."""
    if name in LANGUAGE:
        return LANGUAGE[name]
    raise Unknown(f"triton.language.{name} has no form in torch here")


class _Names:
    """`triton.language`, or a module of it, as a kernel finds it."""

    def __getattr__(self, name: str) -> Any:
        if name in LANGUAGE:
            return LANGUAGE[name]
        if (dtype := as_dtype(_Name(name))) is not None:
            return dtype
        if name in ("extra", "cuda", "libdevice", "math", "core", "standard", "language", "hip"):
            return self
        raise Unknown(f"triton.language.{name} has no form in torch here")


class _Name:
    def __init__(self, name: str) -> None:
        self.name = name


_NAMES = _Names()


class _Rewriting:
    """Kernels' functions with what they name of Triton's replaced, each once."""

    def __init__(self) -> None:
        self._made: dict[Any, FunctionType] = {}

    def function(self, function: Any) -> FunctionType:
        """A kernel's function, or that of one it calls."""
        if function in self._made:
            return self._made[function]
        names: dict[str, Any] = {"__builtins__": _BUILTINS, "__name__": f"triton.{__name__}"}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        new = FunctionType(function.__code__, names, function.__name__, None, cells)
        self._made[function] = new  # it may call itself, or have its own name among its words
        given = function.__globals__
        mentioned = [name for name in _mentioned(function.__code__) if name in given]
        names.update((name, self.resolved(given[name])) for name in mentioned)
        for cell, theirs in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.resolved(theirs.cell_contents)
        new.__defaults__ = tuple(map(self.resolved, function.__defaults__ or ()))
        new.__kwdefaults__ = {
            n: self.resolved(v) for n, v in (function.__kwdefaults__ or {}).items()
        }
        return new

    def resolved(self, value: Any) -> Any:
        """What a kernel finds where its code names something: Triton's own as ours.

        Args:
            value: what the name has outside the kernel.
        """
        name = getattr(value, "_name", None)
        if isinstance(name, str):  # a placeholder
            return _named(name.partition(".")[2])
        if isinstance(value, ModuleType):
            return _NAMES if _is_triton(value.__name__) else value
        if _is_triton(getattr(value, "__module__", None)) and _word(value) in LANGUAGE:
            return LANGUAGE[_word(value)]
        if callable(getattr(value, "fn", None)):
            return self.function(_innermost(value))
        if isinstance(value, torch.dtype):
            return as_dtype(value)
        if _is_triton(type(value).__module__):
            constant = type(value).__name__ == "constexpr"
            return value.value if constant else as_dtype(value) or value
        return value


def _word(value: Any) -> str:
    return str(getattr(value, "__name__", ""))


def _is_triton(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "triton"


def _named(path: str) -> Any:
    found: Any = _NAMES
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _innermost(kernel: Any) -> Any:
    while not inspect.isfunction(kernel) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _mentioned(code: CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(_mentioned, inner))


_BUILTINS = {
    **vars(builtins),
    "min": extreme("min"),
    "max": extreme("max"),
    "range": numbers,
    "print": lambda *args, **by: None,
}
