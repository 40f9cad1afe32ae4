"""Extensions that model code has torch compile: `torch.utils.cpp_extension.load`.

Those with CUDA sources cannot be compiled where there is no CUDA, and code with a path of its own
for the CPU wants them only when it is imported. Here they compile to a module whose functions
refuse to be called; or to its stand-in, where an extension of that name has one, or where its
sources compute what is known (`_cuda_sources`), also as operators, `torch.ops.name`. Operators that
are not known cannot be compiled to code that has a way of its own then (`_tried`). Code that asks
which version of CUDA's compiler there is, as it gives it other flags, hears of one.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fuseport.exporter.shims._patching import patching
from fuseport.exporter.shims._placeholder import refusing
from fuseport.exporter.shims._tried import tried

__all__ = ["COMPILER", "Extension", "none_compiled", "watched"]

COMPILER = "torch.utils.cpp_extension"
"""The name of a stand-in for the compiler of CUDA sources."""

_CUDA = (".cu", ".cuh")
_TOOLKIT = str(Path(__file__).with_name("_toolkit"))  # with a `bin/nvcc` that says its version

# Those that do not compile now, the last one last: names with stand-ins, the names used, and what
# has tensors on CUDA to code that names it.
_active: list[tuple[Sequence[str], list[str], list[Any]]] = []

_real: dict[str, Any] = {}
_HOME = "CUDA_HOME"  # of the compiler's module, where CUDA is
_LIBRARIES = (
    "CUDA_LIB"  # in the environment, where xLSTM's code has CUDA's libraries, as FlashRNN's
)

# Functions of extensions that are known, by the namespaces that they would register them in.
_libraries: dict[str, Mapping[str, Callable[..., Any]]] = {}


class Extension(ModuleType):
    """An extension that was not compiled, with functions of any name: but for those that are given,
    they refuse to be called."""

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name)
        self._place = place

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        reason = (
            f"{self.__name__}.{name} was called, of the extension that {self._place} compiles: "
            "its CUDA sources run on GPUs only, and no exported format holds them. Take the "
            "model's path without it, if there is one, compute it by functions of torch, or "
            "make it an op of your own (README, Ops of your own)"
        )
        return refusing(f"extension {self.__name__}", name, reason)


@contextmanager
def none_compiled(names: Sequence[str], used: list[str], beside: list[Any]) -> Iterator[None]:
    """For the time of the context, extensions with CUDA sources are not compiled.

    Args:
        names: of extensions that have stand-ins.
        used: `COMPILER` joins them when an extension is asked for.
        beside: extensions that are known join these, which have tensors on CUDA to code that names
            them.
    """
    _active.append((names, used, beside))
    if COMPILER in sys.modules:
        _patch(sys.modules[COMPILER])
    _register()
    said = os.environ.get(_LIBRARIES)
    os.environ[_LIBRARIES] = said or _TOOLKIT
    try:
        yield
    finally:
        _active.pop()
        if said is None:
            os.environ.pop(_LIBRARIES, None)
        if not _active:
            _forget()
        if not _active and COMPILER in sys.modules:
            vars(sys.modules[COMPILER]).update(_real)


def watched(spec: ModuleSpec | None) -> ModuleSpec | None:
    """How the compiler is imported while extensions are not compiled, by how it is otherwise."""
    return patching(spec, lambda compiler: _patch(compiler) if _active else None)


def _patch(compiler: ModuleType) -> None:
    if "load" not in _real:
        _real.update({name: getattr(compiler, name) for name in ("load", "load_inline", _HOME)})
    home = _real[_HOME] or _TOOLKIT
    vars(compiler).update({"load": _load, "load_inline": _load_inline, _HOME: home})


def _load(name: str, sources: str | Sequence[str], *args: Any, **options: Any) -> Any:
    """`load`, which model code may keep beyond the context."""
    paths = [sources] if isinstance(sources, str) else sources
    if not _active or not any(Path(source).suffix in _CUDA for source in paths):
        return _real["load"](name, sources, *args, **options)
    given = {**dict(zip(("extra_cflags", "extra_cuda_cflags"), args, strict=False)), **options}
    flags = [*(given.get("extra_cflags") or ()), *(given.get("extra_cuda_cflags") or ())]
    return _stand_in(name, given.get("is_python_module", True), paths, flags)


def _load_inline(
    name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **o: Any
) -> Any:
    """`load_inline`, likewise."""
    if _active and cuda_sources:
        return _stand_in(name, o.get("is_python_module", True))
    return _real["load_inline"](name, cpp_sources, cuda_sources, *args, **o)


def _stand_in(
    name: str, as_module: bool, paths: Sequence[str] = (), flags: Sequence[str] = ()
) -> ModuleType | None:
    names, used, beside = _active[-1]
    if COMPILER not in used:
        used.append(COMPILER)
    if name in names:
        return importlib.import_module(name)
    frame = sys._getframe(2)
    file = Path(frame.f_code.co_filename)
    extension = Extension(name, f"{file.name}:{frame.f_lineno}")
    files = [_found(path, file) for path in paths]
    if files and all(file.is_file() for file in files):
        from fuseport.exporter.shims import _cuda_sources  # it loads torch

        if (known := _cuda_sources.known(files, flags)) is not None:
            vars(extension).update(known.functions)
            beside.append(extension)
            _libraries.update(dict.fromkeys(known.libraries, known.functions))
            _register()
            return extension if as_module else None
    if as_module:
        return extension
    if tried(frame, OSError):  # as torch says it; no function is there that could refuse
        raise OSError(f"no CUDA to compile {name} for: set CUDA_HOME to where its toolkit is")
    return None


def _found(path: str, beside: Path) -> Path:
    """A source: below the working folder, as compilers have it, or one of those that code is in."""
    places = (Path(), *beside.parents)
    return next((p / path for p in places if (p / path).is_file()), Path(path))


def _register() -> None:
    """Have torch find the functions of extensions that are known as operators, too."""
    for name, functions in _libraries.items():
        vars(_namespace(name)).update(functions)


def _forget() -> None:
    for name, functions in _libraries.items():
        for function in functions:
            vars(_namespace(name)).pop(function, None)


def _namespace(name: str) -> Any:
    import torch

    return getattr(torch.ops, name)
