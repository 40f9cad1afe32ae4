"""The command `fuseport`: its commands are in `exporter/commands`; here are errors and exit codes.

Results go to standard output, progress and errors to standard error.
"""

import sys
import traceback
import warnings
from typing import Any

import click

from fuseport import __version__
from fuseport.exporter.commands import COMMANDS
from fuseport.exporter.errors import FuseportError, StorageError
from fuseport.exporter.interrupts import Interrupted, raised, unwrapped

__all__ = ["main"]

_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h: a bug in fuseport, none of its verdicts


class _Commands(click.Group):
    """Turns errors into one line and the exit code that belongs to them."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with raised():
            return super().main(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Whoever has just seen an error adds it at the end.
        debug = ["--debug"] if "--debug" in args else []
        return super().parse_args(ctx, [*debug, *(a for a in args if a != "--debug")])

    def invoke(self, ctx: click.Context) -> Any:
        debug = bool(ctx.params.get("debug"))
        if not debug:
            warnings.simplefilter("ignore")  # torch's own, about things its users cannot change
        try:
            with unwrapped():
                return super().invoke(ctx)
        except FuseportError as error:
            _fail(error, error.exit_code, debug=debug)
        except OSError as error:
            wrapped = StorageError(f"{error.filename or 'the file system'}: {error.strerror}")
            _fail(wrapped, wrapped.exit_code, debug=debug)
        except Interrupted:
            click.echo("fuseport: interrupted", err=True)
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # a bug: said as such, not as a verdict
            text = f"a bug in fuseport: {type(error).__name__}: {error}; --debug shows where"
            _fail(error, _INTERNAL_ERROR, debug=debug, text=text)


def _fail(error: BaseException, code: int, *, debug: bool, text: str | None = None) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    message = " ".join((text or str(error)).split())
    click.echo(f"fuseport: {message}", err=True)
    for line in getattr(error, "details", ()):
        click.echo(f"  {' '.join(line.split())}", err=True)
    sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fuseport")
@click.option("--debug", is_flag=True, help="Show tracebacks and warnings.")
def main(debug: bool) -> None:
    """Export models with fused custom ops, and prove outputs and gradients.

    A checkpoint becomes TorchScript, ONNX and exported programs, for the forward pass and for its
    gradients; every artifact is then compared with the model, in every runtime.
    """


for _command in COMMANDS:
    main.add_command(_command)


if __name__ == "__main__":
    main()
