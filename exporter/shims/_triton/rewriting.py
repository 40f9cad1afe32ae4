"""Kernels' functions, with what they name of Triton's replaced by what computes it here."""

import builtins
import inspect
import operator
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from fuseport.exporter.shims._triton.assigning import WRITTEN, assigning
from fuseport.exporter.shims._triton.dtypes import as_dtype
from fuseport.exporter.shims._triton.language import LANGUAGE, extreme, numbers
from fuseport.exporter.shims._triton.programs import Unknown

__all__ = ["Rewriting", "layers", "member"]


def member(name: str) -> Any:
    """A function that a block has as its method."""
    if name in LANGUAGE:
        return LANGUAGE[name]
    raise Unknown(f"triton.language.{name} has no form in torch here")


class _Names:
    """`triton.language`, or a module of it, as a kernel finds it."""

    def __getattr__(self, name: str) -> Any:
        if name in ("extra", "cuda", "libdevice", "math", "core", "standard", "language", "hip"):
            return self
        return as_dtype(SimpleNamespace(name=name)) or member(name)


_NAMES = _Names()


def layers(kernel: Any) -> Iterator[Any]:
    """A kernel, what it is wrapped around, and so on, down to its function."""
    yield kernel
    while not inspect.isfunction(kernel) and hasattr(kernel, "fn"):
        kernel = kernel.fn
        yield kernel


class Rewriting:
    """Kernels' functions with what they name of Triton's replaced, each once."""

    def __init__(self) -> None:
        self._made: dict[Any, FunctionType] = {}

    def function(self, function: Any) -> FunctionType:
        """A kernel's function, or that of one it calls."""
        if function in self._made:
            return self._made[function]
        names: dict[str, Any] = {
            "__builtins__": _BUILTINS,
            "__name__": f"triton.{__name__}",
            **WRITTEN,
        }
        theirs = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        code = assigning(function)
        cells = tuple(CellType() for _ in code.co_freevars)
        new = FunctionType(code, names, function.__name__, None, cells)
        self._made[function] = new  # it may call itself, or have its own name among its words
        given = function.__globals__
        mentioned = [name for name in _mentioned(function.__code__) if name in given]
        names.update((name, self.resolved(given[name])) for name in mentioned)
        for cell, name in zip(cells, code.co_freevars, strict=True):
            cell.cell_contents = self.resolved(theirs[name].cell_contents)
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
            return operator.attrgetter(name.partition(".")[2])(_NAMES)
        if isinstance(value, ModuleType):
            return _NAMES if _is_triton(value.__name__) else value
        if _is_triton(getattr(value, "__module__", None)) and _word(value) in LANGUAGE:
            return LANGUAGE[_word(value)]
        if callable(getattr(value, "fn", None)):
            return self.function([*layers(value)][-1])
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
