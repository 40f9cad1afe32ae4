"""Code of the user's own: a module by name, a file, or a folder that is a package.

It runs because the user named it, and only then.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.program import one_line

__all__ = ["imported"]


def imported(said: str, place: str) -> ModuleType:
    """The module that `place` names: `package.module`, `file.py` or a folder.

    Args:
        said: the option and what was given for it, which messages begin with.
        place: a path if it ends in `.py` or has a folder in it.

    Raises:
        UsageError: there is none.
        Missing: importing it fails.
    """
    is_path = place.endswith(".py") or "/" in place or Path(place, "__init__.py").is_file()
    return _import_file(said, Path(place)) if is_path else _import(said, place)


def _import(said: str, name: str) -> ModuleType:
    with _importing(said, Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports what is not
            raise UsageError(f"{said}: there is no module {error.name}") from error


def _import_file(said: str, path: Path) -> ModuleType:
    if not path.exists():
        raise UsageError(f"{said}: there is no file {path}")
    path = path.resolve()
    file, inside = (path / "__init__.py", [str(path)]) if path.is_dir() else (path, None)
    if not file.is_file():
        raise UsageError(f"{said}: {path.name} is no Python file, and no package")
    # Not under its stem, which may be that of an installed module.
    spec = importlib.util.spec_from_file_location(
        f"user_code_{path.stem}", file, submodule_search_locations=inside
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importing(said, path.parent):
        sys.modules[spec.name] = module  # dataclasses, for one, look their module up
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing(said: str, folder: Path) -> Iterator[None]:
    """Import with the neighbours in reach, as if the code were run; a failure leaves no trace."""
    modules, paths = set(sys.modules), list(sys.path)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        yield
    except BaseException as error:
        sys.path[:] = paths
        for name in sys.modules.keys() - modules:
            # Only the user's own: extension modules cannot be loaded twice.
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
        if isinstance(error, UsageError | KeyboardInterrupt):
            raise
        # The user's code can raise anything when imported, SystemExit too.
        raise Missing(f"{said}: importing it failed: {one_line(error)}") from error
