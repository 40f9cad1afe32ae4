"""Stand-ins for packages that exist for CUDA only, so that other people's model code imports as is.

    with fuseport.shims.installed("auto") as used:
        import their_model

One file or folder here is one stand-in, laid out like the package that it is called after; their
functions call the registered ops of `fuseport.ops`. `_any.py` in a folder serves the submodules
that have no file of their own. Stand-ins import each other relatively, and so keep one identity.

Many a repository has a copy of mamba_ssm inside, `theirs/mamba_ssm/…`. Its modules call the CUDA
extensions, which have stand-ins, and Triton kernels, which have none: the files of these are served
as those of mamba_ssm itself are.

Some packages run on GPUs only in parts: flash-linear-attention, `fla`, is imported as it is
installed, and its functions that launch Triton kernels give way to ours, see `_overlay`.

Some are compiled by a repository for a package of its own, `theirs.ops.deform_conv_ext`: they have
their stand-ins wherever they are imported from, see `_extensions`.

One is of a device: `torch.cuda`, under which `x.cuda()` and `device="cuda"` leave all on the CPU,
and one of a compiler, `torch.utils.cpp_extension`, which then leaves CUDA sources alone, or gives
what computes the same, see `_cuda_sources`.

`pkg_resources`, which setuptools has no more, and the versions of packages with stand-ins are here
since code asks for these as it is imported, see `_distributions`.

Kernels that CuPy compiles of their text have a form in torch where they are known, see
`_raw_kernels`. Those that are written in Triton are computed by torch, see `_triton`, by Triton's
stand-in, and where Triton itself is installed, too.
"""

import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from fuseport.exporter.errors import UsageError
from fuseport.exporter.shims import _cuda, _distributions, _extensions, _overlay
from fuseport.exporter.shims._compiled import COMPILER, none_compiled, watched
from fuseport.exporter.shims._extensions import DCN_V2, EXTENSIONS
from fuseport.exporter.shims._overlay import OVERLAID, Lender

__all__ = [
    "AUTO",
    "EXTENSIONS",
    "OVERLAID",
    "SHIMS",
    "active",
    "at_call",
    "called",
    "chosen",
    "installed",
    "used_again",
]

AUTO = "auto"
"""In the place of names: all stand-ins whose package, or device, is not there."""

SHIMS: tuple[str, ...] = (
    *(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")),
    *EXTENSIONS,
)
"""The packages, and extensions inside packages, that there are stand-ins for."""

_FOLDER = Path(__file__).parent

_LAUNCHES = "triton.runtime.jit"
_INSIDE = (_cuda.MOVES, COMPILER, _LAUNCHES)
"""Modules of packages that are there, of which a part has a stand-in."""

_KERNELS = "mamba_ssm.ops"
_COPIED = re.compile(
    r"(\.mamba_ssm)?(?:\.|^)ops\.(triton\.\w+|(?:triton|tilelang|cute)\.mamba3\.\w+)$"
)
# Of the files that have stand-ins, one kernel each, or the function that calls those of others.
_THEIRS = re.compile(
    rb"^def (?:(?:_layer_norm_fwd_1pass|_selective_scan_update|_chunk_scan_chunk_state_bwd_dx"
    rb"|mamba3_siso_step|rotary_qk_inference|angle_dt_fwd)_kernel"
    rb"|mamba3_siso_combined|mamba3_mimo|mamba3_step_fn)\(",
    re.MULTILINE,
)

# Packages whose Python code repositories have with them, by what of them is compiled: without that
# they are not there.
_COMPILED = {
    "DCNv4": "DCNv4.ext",
    "MinkowskiEngine": "MinkowskiEngineBackend",
    "torchsparse": "torchsparse.backend",
}

# Each stand-in is executed once in a process, so that `isinstance` of its classes holds from one
# use to the next: user modules that stay imported keep the classes of the first.
_executed: dict[str, ModuleType] = {}

# Of them, those of extensions, and CuPy's: in files with one of these, tensors are on CUDA.
_of_extensions: list[Any] = []

# Packages that no finder serves just now.
_aside: set[str] = set()

# The modules of triton itself, while its stand-in has their place: executed again, they fail.
_lent: dict[str, ModuleType] = {}


def chosen(which: str | Iterable[str]) -> tuple[str, ...]:
    """`which` as names, `AUTO` among them or not; several may be one text with commas.

    Raises:
        UsageError: there is no stand-in of a name.
    """
    given = [which] if isinstance(which, str) else which
    names = tuple(dict.fromkeys(name for some in given for name in some.split(",")))
    for name in names:
        if name not in (AUTO, *SHIMS, *OVERLAID, *_INSIDE):
            known = ", ".join((AUTO, *SHIMS, *OVERLAID, *_INSIDE))
            raise UsageError(f"shim {name}: there is no such stand-in; there are: {known}")
    return names


def called(name: str) -> str:
    """What a module is called that may have a stand-in: an extension as such, others as packages.

    In a package, `_ext` may be any.
    """
    extension = _extensions.ending(name)
    if extension is None or (extension == DCN_V2 and name != DCN_V2):
        return _root(name)
    return extension


def active(which: Iterable[str]) -> bool:
    """Whether the stand-ins of these names are on the import path now."""
    return _serving(which) is not None


def _serving(which: Iterable[str]) -> "_Finder | None":
    finders = (finder for finder in sys.meta_path if isinstance(finder, _Finder))
    return next((finder for finder in finders if finder.serves(which)), None)


@contextmanager
def installed(which: str | Iterable[str] = AUTO) -> Iterator[list[str]]:
    """Stand-ins on the import path, for the time of the context.

    Args:
        which: `auto` for all whose package is not installed, or names, or both. A package that is
            installed is replaced only when it is named; it is back afterwards. `torch.cuda`, which
            `auto` is where torch sees no GPU, keeps what is moved to CUDA where it is; so does
            `torch.utils.cpp_extension` with what code has torch compile of CUDA sources.

    Yields:
        The names of the packages whose stand-ins have been imported, filled as that happens.

    Raises:
        UsageError: there is no stand-in of a name.
    """
    names = chosen(which)
    used: list[str] = []
    finder = _Finder(names, used)
    if "triton" in names and "triton" not in _executed and finder.is_there("triton"):
        _ask_torch()  # before the answer becomes another one
    replaced = {n: m for n, m in sys.modules.items() if called(n) in names and not _is_ours(m)}
    _lent.update({n: m for n, m in replaced.items() if _root(n) == "triton"})
    outside = {n: m for n, m in sys.modules.items() if _is_ours(m)}
    for name in (*replaced, *outside):
        del sys.modules[name]
    if finder.overlays():
        outside |= _overlay.aside()
    sys.meta_path.insert(0, finder)
    try:
        with (
            _cuda.of_cpu_allowed(),
            _cuda.said_beside(_of_extensions),
            _device(names, used),
            _answers(names),
            _compiler(names, used),
            _kernels(names),
            _launches(names, finder),
            _distributions.heard(finder.has_place_of),
        ):
            yield used
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, m in sys.modules.items() if _is_ours(m)]:
            del sys.modules[name]
        if finder.overlays():
            _overlay.aside()
        sys.modules.update(replaced | outside)


def used_again(name: str) -> None:
    """Notes a stand-in that is called, as if it was imported now: a package of which modules stay
    imported is used with what they have.
    """
    finder = _serving([AUTO]) or _serving([name])
    if finder is not None and name not in finder.used:
        finder.used.append(name)


def at_call(which: Sequence[str]) -> AbstractContextManager[Any]:
    """Stand-ins for a call of model code: `installed`, unless they are there already.

    Installing them looks through all modules: once is enough where calls are timed. That of the
    device is a mode of torch's, and so each thread's own, and not there in what is called through
    torch, such as the second forward of a checkpoint: it comes anew.
    """
    finder = _serving(which)
    return installed(which) if finder is None else _device(which, finder.used)


def _device(names: Iterable[str], used: list[str]) -> AbstractContextManager[Any]:
    if _cuda.MOVES in names or (AUTO in names and not _cuda.is_there()):
        return _cuda.none_moves(used)
    return nullcontext()


def _answers(names: Iterable[str]) -> AbstractContextManager[Any]:
    """Of a device, to code that moves to it, or whose kernels are computed."""
    asked = {AUTO, _cuda.MOVES, COMPILER, "triton", _LAUNCHES}
    return nullcontext() if asked.isdisjoint(names) else _cuda.answered()


def _compiler(names: Iterable[str], used: list[str]) -> AbstractContextManager[Any]:
    if COMPILER in names or (AUTO in names and not _cuda.is_there()):
        return none_compiled(SHIMS, used, _of_extensions)
    return nullcontext()


def _kernels(names: Iterable[str]) -> AbstractContextManager[Any]:
    if "cupy" not in names and AUTO not in names:
        return nullcontext()
    from fuseport.exporter.shims._raw_kernels import computed

    return computed(_of_extensions)


@contextmanager
def _launches(names: Iterable[str], finder: "_Finder") -> Iterator[None]:
    if not {AUTO, "triton", _LAUNCHES}.isdisjoint(names):
        from fuseport.exporter.shims._triton import installed, library

        theirs = "triton" not in names and finder.is_there("triton")
        with library.inlined(), installed.computed(finder.used) if theirs else nullcontext():
            yield
    else:
        yield


class _Finder(MetaPathFinder):
    """Serves stand-ins, from the front of `sys.meta_path`."""

    def __init__(self, names: Sequence[str], used: list[str]) -> None:
        self._names = names
        self.used = used

    def serves(self, names: Iterable[str]) -> bool:
        """Whether it was made for these names, `AUTO` being one."""
        return set(names) <= set(self._names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        extension = None if _is_ours(parent) else _extensions.called(fullname)
        if extension is not None:
            return self._extension(extension, fullname, path)
        root = _root(fullname)
        if fullname == COMPILER:
            return watched(self._elsewhere(fullname, path))
        if fullname == _distributions.ASKED and self.is_there(fullname):
            return _distributions.watched(self._elsewhere(fullname, path), self.has_place_of)
        if fullname == _LAUNCHES and not _is_ours(parent):
            from fuseport.exporter.shims._triton import installed as of_triton

            return of_triton.watched(self._elsewhere(fullname, path))
        if root in OVERLAID and self.overlays():
            return _overlay.lent(fullname, self._elsewhere(fullname, path), self.used)
        if (own := self._kernels_of(fullname, path)) and self._replaces_kernels():
            return importlib.util.spec_from_loader(fullname, Lender(importlib.import_module(own)))
        if root not in SHIMS or root in _aside:
            return None
        if root == "triton" and _torch_imports():
            real = _lent.get(fullname)
            return importlib.util.spec_from_loader(fullname, Lender(real)) if real else None
        if parent is None:
            if not self.has_place_of(root):
                return None
        elif not _is_ours(parent):
            return None
        file = _file(fullname)
        if file is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: fuseport's stand-in for {root} has no such part",
                name=fullname,
            )
        if fullname == "triton" and not _lent:
            _tell_torch()
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        if file.stem == "_any":
            folder = []
        loader = _Loader(file, self.used, fullname)
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=folder
        )

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        """What `importlib.metadata` hears of."""
        wanted = context or DistributionFinder.Context()
        return _distributions.distributions(wanted, self.has_place_of)

    def has_place_of(self, package: str) -> bool:
        """Whether a package's stand-in is imported in its place."""
        return package in self._names or (AUTO in self._names and not self.is_there(package))

    def _extension(self, name: str, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """How `fullname` is imported, which is the extension of that name in whatever package."""
        given = name in self._names
        if not given and (AUTO not in self._names or self._elsewhere(fullname, path) is not None):
            return None
        file = _extensions.file(name)
        loader = _Loader(file, self.used, name)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)

    def _kernels_of(self, fullname: str, path: Sequence[str] | None) -> str | None:
        """The stand-in for a file of Triton kernels that is copied from mamba_ssm; None if it is no
        such. In a copy of the package the name tells; elsewhere, what the file defines."""
        found = _COPIED.search(fullname)
        if (
            found is None
            or _root(fullname) in (*SHIMS, "fuseport")
            or _file(f"{_KERNELS}.{found[2]}") is None
        ):
            return None
        if not found[1]:
            spec = self._elsewhere(fullname, path)
            file = None if spec is None or spec.origin is None else Path(spec.origin)
            if file is None or file.suffix != ".py" or not _THEIRS.search(file.read_bytes()):
                return None
        return f"{_KERNELS}.{found[2]}"

    def overlays(self) -> bool:
        """Whether packages that are there are overlaid."""
        return AUTO in self._names or not OVERLAID.keys().isdisjoint(self._names)

    def _elsewhere(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The first answer of another finder."""
        return next(filter(None, (f.find_spec(name, path) for f in self._others())), None)

    def _others(self) -> Iterator[Any]:
        return (finder for finder in sys.meta_path if not isinstance(finder, _Finder))

    def _replaces_kernels(self) -> bool:
        """Whether the kernels of a copy of mamba_ssm are to be replaced."""
        if "mamba_ssm" in self._names:
            return True
        return AUTO in self._names and not any(map(self.is_there, ("mamba_ssm", "triton")))

    def is_there(self, name: str) -> bool:
        """Whether another finder has the package; an empty folder of that name does not count, nor
        one without the extension that it is nothing without."""
        specs = (finder.find_spec(name, None) for finder in self._others())
        return any(
            spec is not None
            and spec.origin is not None
            and (name not in _COMPILED or _has(spec, _COMPILED[name]))
            for spec in specs
        )


def _has(package: ModuleSpec, module: str) -> bool:
    inside = package.submodule_search_locations if "." in module else None
    found = PathFinder.find_spec(module.rpartition(".")[2], inside)
    return found is not None and found.origin is not None  # which a folder of sources has not


class _Loader(Loader):
    """Executes a stand-in, of the name that it is kept under."""

    def __init__(self, file: Path, used: list[str], name: str) -> None:
        self._file = file
        self._used = used
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _executed.get(self._name)

    def exec_module(self, module: ModuleType) -> None:
        name = self._name
        package = called(name)
        if package not in self._used:
            self._used.append(package)
        if name not in _executed:
            code = compile(self._file.read_bytes(), self._file, "exec", dont_inherit=True)
            exec(code, module.__dict__)
            vars(module).setdefault("__getattr__", partial(_private, name))
            _executed[name] = module
            if name in EXTENSIONS or name == "cupy":
                _of_extensions.append(module)


def _private(module: str, name: str) -> Any:
    """What stands for a package's own part, as code that imports more than it calls asks for."""
    if name.startswith("__") or not name.startswith("_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def part(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{module}.{name} was called, of which fuseport's stand-in for {called(module)} has no "
            "form: call the public function that it is a part of"
        )

    return part


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_ours(module: ModuleType | None) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


def _file(fullname: str) -> Path | None:
    """The file here that stands in for a module."""
    path = _FOLDER.joinpath(*fullname.split("."))
    general = _FOLDER / _root(fullname) / "_any.py"
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"), general)
    return next((file for file in candidates if file.is_file()), None)


def _torch_imports() -> bool:
    """Whether a module of torch is being imported: then it is torch that asks, not the user's code.

    What torch would import to learn the answer now may be what is only half there.
    """
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in tuple(sys.modules.items())
        if _root(name) == "torch"
    )


def _tell_torch() -> None:
    """Have torch ask for triton now, while there is none: it keeps the answers."""
    _aside.add("triton")
    try:
        _ask_torch()
    finally:
        _aside.discard("triton")


def _ask_torch() -> None:
    from torch.utils import _triton

    for ask in ("has_triton_package", "get_triton_version", "has_triton"):
        with suppress(AttributeError):  # in versions of torch that do not ask so
            getattr(_triton, ask)()
    with suppress(ImportError):  # as above; the compiler keeps the answer in a module of its own
        importlib.import_module("torch._inductor.runtime.triton_compat")
