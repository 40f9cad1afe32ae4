"""What commands print with and parse alike."""

import ctypes
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fuseport.exporter.errors import UsageError
from fuseport.exporter.garbage import importing

if TYPE_CHECKING:
    from rich.table import Table

    from fuseport.exporter.api import Progress

__all__ = [
    "JSON",
    "OPS",
    "device_option",
    "loading",
    "names_option",
    "one_of",
    "progress",
    "show",
    "there",
    "width",
    "write",
]

JSON = click.option(
    "--json", "json_", type=click.Path(path_type=Path), help="Write the result; - prints it."
)

OPS = click.option(
    "--ops", "own", metavar="FILE", help="Your own: a file, folder or module that defines SPEC(S)."
)


def device_option(what: str) -> Callable[[Any], Any]:
    """`--device`, with what it is the device of."""
    return click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda", help=what)


def names_option(option: str, *parameter: str, what: str) -> Callable[[Any], Any]:
    """An option that takes names: given several times, or with commas between them."""
    return click.option(
        option,
        *parameter,
        multiple=True,
        metavar="NAME,…",
        help=what,
        callback=_names,
    )


def _names(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for some in given for name in some.split(","))
    if "" in names:
        raise UsageError(f"{option.opts[0]} {','.join(given)}: a name is empty")
    return names


def there(path: Path) -> None:
    """Refuse a path at which nothing is, before torch is loaded, which takes seconds.

    Raises:
        UsageError: it is one.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        said = f"{path}: there is no such file or folder; check the path"
        raise UsageError(said) from error
    except OSError:
        return  # whoever reads it says what is wrong


@contextmanager
def progress(*, timed: bool = False) -> "Iterator[Progress]":
    """Tells what is being done: a moving line in a terminal, plain lines elsewhere.

    Standard output is for the result, which is printed afterwards: whatever a user's model, a
    library or a runtime prints there meanwhile goes to standard error.

    Args:
        timed: whether time is what is measured. Where it is not, and the user has not said
            otherwise, threads of torch that wait for one another sleep, here and in children.
    """
    if not timed:
        # By default they spin. Where other processes want the processors too, each of the many
        # small steps of a truth then waits for a thread that does not run: ten times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    with _standard_output_kept(), _telling() as tell, _logged(tell):
        yield tell


@contextmanager
def _telling() -> "Iterator[Progress]":
    if not sys.stderr.isatty():
        begin = time.monotonic()
        yield lambda message: click.echo(f"{time.monotonic() - begin:6.1f} s  {message}", err=True)
        return
    from rich.console import Console

    with Console(stderr=True, emoji=False, markup=False).status("starting") as status:
        yield lambda message: status.update(message)


@contextmanager
def _logged(tell: "Progress") -> Iterator[None]:
    """What fuseport logs is told: what takes long as a step, warnings as lines of their own."""
    logger, handler = logging.getLogger("fuseport"), _Teller(tell)
    filters = {"transformers.integrations.hub_kernels": _no_fallback}
    if "TORCH_LOGS" not in os.environ:  # which asks for them
        filters |= dict.fromkeys(_OF_CAPTURES, _nothing)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    for name, function in filters.items():
        logging.getLogger(name).addFilter(function)
    try:
        yield
    finally:
        for name, function in filters.items():
            logging.getLogger(name).removeFilter(function)
        logger.removeHandler(handler)
        logger.setLevel(level)


_OF_CAPTURES = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""What torch logs of a capture that fails, at times as a traceback: the error says it in a line."""


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _no_fallback(record: logging.LogRecord) -> bool:
    """Not that transformers takes its plain path: truth is computed by it on purpose."""
    return "falling back to its reference" not in record.getMessage()


class _Teller(logging.Handler):
    def __init__(self, tell: "Progress") -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            self._tell(record.getMessage())
        else:
            click.echo(record.getMessage(), err=True)


@contextmanager
def loading(tell: "Progress") -> Iterator[None]:
    """Within, what needs torch is imported."""
    tell("loading torch")
    with importing():
        yield


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    with redirect_stdout(sys.stderr):
        try:
            kept = os.dup(1)
        except OSError:  # it is closed: nobody reads it
            yield
            return
        try:
            os.dup2(2, 1)  # for code that is not Python, and for children
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has in its buffer would come out later
            os.dup2(kept, 1)
            os.close(kept)


def write(result: Any, file: Path | None, lines: list[str]) -> None:
    """A result as JSON, to a file or printed; or else as a table, with lines below."""
    if file is not None and str(file) == "-":
        click.echo(result.to_json())
        return
    if file is not None:
        from fuseport.exporter.bundle.staging import write_whole

        write_whole(file, f"{result.to_json()}\n".encode())
    show(result.table(), lines)


def show(table: "Table | None", lines: Iterable[str]) -> None:
    """Print a table and lines below it on standard output."""
    from rich.console import Console

    out = Console(highlight=False, emoji=False, width=width())
    if table is not None:
        out.print(table)
    for line in lines:
        # A folded line is hard to search for.
        out.print(line, markup=False, soft_wrap=not sys.stdout.isatty())


def width() -> int:
    """Columns for a table. A pipe has none; CI logs are wide, and folded tables hard to read."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 120


def one_of(name: str, known: Any, what: str) -> Any:
    """`name` if it is known; UsageError with what there is, if not."""
    if name not in known:
        raise UsageError(f"{name} is not a {what}; there are: {', '.join(known)}")
    return name
