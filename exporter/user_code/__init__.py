"""Code of the user's own: a module by name, a file, or a folder that is a package.

It runs because the user named it, and only then.
"""

import ast
import hashlib
import importlib
import importlib.util
import itertools
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

from fuseport.exporter import shims
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.interrupts import Interrupted
from fuseport.exporter.program import near, one_line
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.user_code.known_calls import advice

__all__ = ["digest", "hint", "imported", "imported_once"]


def imported(said: str, place: str) -> ModuleType:
    """The module that `place` names: `package.module`, `file.py` or a folder.

    Args:
        said: the option and what was given for it, which messages begin with.
        place: a path if it ends in `.py` or has a folder in it.

    Raises:
        UsageError: there is none.
        Missing: importing it fails.
    """
    return _import_file(said, Path(place)) if _is_path(place) else _import(said, place)


def imported_once(said: str, place: str) -> ModuleType:
    """The same, but a file that this process has imported already is not run again.

    It has the name under which its neighbours import it, so that they get the same module: what
    registers operators can run only once.

    Raises:
        UsageError: there is none, or it has changed since it was imported.
        Missing: importing it fails.
    """
    if not _is_path(place):
        return _import(said, place)
    path = Path(place).resolve()
    file = path / "__init__.py" if path.is_dir() else path
    for module in list(sys.modules.values()):
        known = getattr(module, "__file__", None)
        if known is not None and Path(known) == file:
            if _read.get(file, digest(path)) != digest(path):
                raise UsageError(f"{said}: it has changed since it was imported: start again")
            return module
    module = _import_file(said, Path(place), as_neighbour=True)
    _read[file] = digest(path)
    return module


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the files in a folder, in hexadecimal."""
    whole = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in (f for f in files if "__pycache__" not in f.parts):
        name = "" if file == path else file.relative_to(path).as_posix()
        whole.update(f"{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return whole.hexdigest()


_read: dict[Path, str] = {}
"""What was imported once, as it was then."""


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place or Path(place, "__init__.py").is_file()


def _import(said: str, name: str) -> ModuleType:
    with _importing(said, Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports what is not
            raise UsageError(f"{said}: there is no module {error.name}") from error


def _import_file(said: str, path: Path, *, as_neighbour: bool = False) -> ModuleType:
    if not path.exists():
        raise UsageError(f"{said}: there is no file {path}")
    path = path.resolve()
    file, inside = (path / "__init__.py", [str(path)]) if path.is_dir() else (path, None)
    if not file.is_file():
        raise UsageError(f"{said}: {path.name} is no Python file, and no package")
    with _importing(said, path.parent, file):
        # Not under its stem, which may be that of an installed module.
        name = f"user_code_{path.stem}"
        if as_neighbour and _found_by(path.stem) == file:
            name = path.stem
        spec = importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, str(file)), submodule_search_locations=inside
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses, for one, look their module up
        spec.loader.exec_module(module)
    return module


class _Loader(SourceFileLoader):
    """Reads the source always: what changed within a second would be taken for its old bytecode."""

    def path_stats(self, path: str | bytes | PathLike[str]) -> NoReturn:
        """No time of change, without which no bytecode is looked for or written."""
        raise OSError


def _found_by(name: str) -> Path | None:
    """The file that `import name` would run."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if found is None or found.origin is None else Path(found.origin)


@contextmanager
def _importing(said: str, folder: Path, file: Path | None = None) -> Iterator[None]:
    """Import with the neighbours in reach, as if the code were run; a failure leaves no trace."""
    modules, paths = set(sys.modules), list(sys.path)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        with own_backward.watched():
            yield
    except BaseException as error:
        sys.path[:] = paths
        for name in sys.modules.keys() - modules:
            # Only the user's own: extension modules cannot be loaded twice.
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
        if isinstance(error, UsageError | KeyboardInterrupt | Interrupted):
            raise
        # The user's code can raise anything when imported, SystemExit too.
        absent = isinstance(error, ModuleNotFoundError)
        details = absent_imports(file or folder) if absent else ()
        what_to_do = hint(error) or _of_a_package(error, said, file)
        text = f"{said}: importing it failed{_at(error)}: {one_line(error)}{what_to_do}"
        raise Missing(text, details) from error


def _of_a_package(error: BaseException, said: str, file: Path | None) -> str:
    """How to name code that imports from its own package, and was given as a file of none."""
    if file is None or "attempted relative import" not in str(error):
        return ""
    folder, parts = file.parent, [file.stem]
    while not parts[1:] or (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    option, _, rest = said.partition(" ")
    _, colon, name = rest.rpartition(":")
    beyond = "" if folder == Path.cwd() else f", in the folder {folder}"
    return f"; it is part of a package: {option} {'.'.join(parts)}{colon}{name}{beyond}"


def hint(error: BaseException) -> str:
    """What to do about a package that is missing, or a GPU; nothing for other errors."""
    if _is_of_no_gpu(error):
        return "; --shim auto leaves on the CPU what code moves to CUDA"
    if place := _compiling(error):
        return (
            f"; {place} compiles an extension (torch.utils.cpp_extension), for which its sources "
            "and a compiler have to be there: --shim auto leaves out one of CUDA, where the code "
            "has a way without; else compute it by functions of torch, or make it an op of your "
            "own (README, Ops of your own)"
        )
    if isinstance(error, NameError):
        return _swallowed(error, error.name)
    if isinstance(error, NotImplementedError) and not str(error):
        return _swallowed(error)
    if isinstance(error, AttributeError) and error.name == "quant_state":
        return (
            "; a layer of bitsandbytes holds its weight as fuseport.ops.nf4_linear takes it here:"
            " call the layer itself, or ask it for its `weight`, which has the values"
        )
    if type(error) is ImportError and _is_in_a_copy(error):
        return "; --shim auto,mamba_ssm has fuseport's stand-in take the place of the whole copy"
    name = error.name if isinstance(error, ModuleNotFoundError) else _not_beside(error)
    if name is None:
        return ""
    root = name.partition(".")[0]
    if (package := shims.called(name)) in shims.SHIMS:
        inside = package == root != name  # a part that the stand-in has not
        return "" if inside else f"; fuseport has a stand-in for {package}: --shim auto"
    package = shims.OVERLAID.get(root, root)
    return f"; if it is a package, and not a file of yours: pip install {package}"


def _at(error: BaseException) -> str:
    """The line of Python's that failed, for a sentence; nothing where that is not known."""
    frames = (f for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<")
    places = [f for f in frames if not f.filename.startswith(_OURS)]
    return f" at {near(places[-1].filename)}:{places[-1].lineno}" if places else ""


_OURS = str(Path(__file__).parents[1])


def _is_in_a_copy(error: BaseException) -> bool:
    """Whether code failed that a repository has copied from mamba_ssm."""
    frames = traceback.extract_tb(error.__traceback__)
    files = (Path(frame.filename) for frame in frames if not frame.filename.startswith(_OURS))
    return any("mamba_ssm" in file.parts for file in files)


def _compiling(error: BaseException) -> str | None:
    """Where code had torch compile an extension when it failed."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = (frame for frame in frames if not frame.filename.startswith(_OURS))
    for caller, frame in itertools.pairwise(theirs):
        if frame.filename == _COMPILER != caller.filename:
            return f"{Path(caller.filename).name}:{caller.lineno}"
    return None


_COMPILER = str(Path(torch.__file__).parent / "utils" / "cpp_extension.py")


def _not_beside(error: BaseException) -> str | None:
    """What `from . import NAME` did not find, where Python names the package alone."""
    if type(error) is not ImportError or error.name is None:
        return None
    found = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{error.name}.{found[1]}" if found and found[1] in shims.SHIMS else None


def _swallowed(error: BaseException, name: str | None = None) -> str:
    """The import, failed in a `try`, that a name that is not there should have come from.

    Without a name: that of an extension which has a stand-in, if the file that raises has one: such
    code refuses the CPU before it calls the extension.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    file = Path(frames[-1].filename)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try))
    for node in (each for part in tries for each in ast.walk(part)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        module = (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        imports = {module, *(alias.name for alias in node.names)}
        known = [each for each in imports if shims.called(each) in shims.EXTENSIONS]
        if not name and known:
            module = known[0]
        if (name in bound if name else known) and not _findable(module.partition(".")[0]):
            what_to_do = advice(module, otherwise=f"pip install {module.partition('.')[0]}")
            return f"; {file.name}:{node.lineno}: {module} is not installed; {what_to_do}"
    return ""


def _is_of_no_gpu(error: BaseException) -> bool:
    """Whether torch says that it has no CUDA, no driver, or no GPU, or that it asks for one."""
    said = (
        *("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available"),
        "For combine_mode='pointwise', all input tensors need to be on CUDA",
    )
    return str(error).startswith(said)


def absent_imports(place: Path) -> list[str]:
    """What is imported and not installed, by a file and those beside it that it imports.

    Found by reading, not by running: one import that fails would hide the others. Imports within
    `try` are left out, since code that has them can do without.

    Args:
        place: a file; of a folder, all files in it are read.

    Returns:
        A line for each module: where it is imported, and what to do.
    """
    waiting = [place] if place.is_file() else sorted(place.glob("*.py"))
    root = place.parent if place.is_file() else place
    read: set[Path] = set()
    found: dict[str, str] = {}
    while waiting:
        file = waiting.pop(0)
        if file in read:
            continue
        read.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # importing it says so
        for line, name in _imports(tree):
            local = root.joinpath(*name.split("."))
            beside = [local.with_suffix(".py"), local / "__init__.py"]
            there = [path for path in beside if path.is_file()]
            waiting += there
            top = name.partition(".")[0]
            if not there and not (root / top).exists() and not _findable(top):
                where = f"{file.name}:{line}: {name} is not installed"
                found.setdefault(name, f"{where}; {advice(name, otherwise='install it')}")
    return list(found.values())


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of each absolute import, but for those within `try` and functions, and where
    a file is run as a program."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module
        elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.Try | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(node)


def _findable(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
