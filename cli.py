"""The command `fuseport`: parses, calls `exporter`, and prints. Nothing is decided here.

Results go to standard output, progress and errors to standard error. Heavy imports wait until a
command needs them, so that `--help` is instant.
"""

import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from fuseport import __version__
from fuseport.exporter.errors import FuseportError, StorageError, UsageError

if TYPE_CHECKING:
    from fuseport.exporter.api import Progress

__all__ = ["main"]

_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h: a bug in fuseport, none of its verdicts
_LISTED = 20

_EXPORT = """\b
Examples:
  fuseport export model.ckpt -o bundle/
  fuseport export hf_folder/ -o bundle/ --force
  fuseport export model.ckpt -o b/ --format onnx --program gradient --opset 18 --dtype bfloat16
  fuseport export model.ckpt -o b/ --model net.py:Net --input-shapes 'x:[batch,length,64]'
"""

_VERIFY = """\b
Examples:
  fuseport verify bundle/
  fuseport verify bundle/ --runtime onnxruntime --json report.json
  fuseport verify bundle/ --artifact simplified.onnx
  fuseport verify bundle/ --model net.py:Net --strict
\b
Exit codes: 0 pass, 1 mismatch, 2 usage, 3 refused as unsafe, 4 unreadable or corrupt input,
5 something needed is missing, 6 a runtime crashed, 7 reading or writing failed, 8 export failed.
"""

_BENCH = """\b
Examples:
  fuseport bench bundle/
  fuseport bench bundle/ --size length=1024,batch=1 --program forward --json bench.json
  fuseport bench bundle/ --runtime onnxruntime --runtime onnxruntime+fused
"""

_OPS = """\b
Examples:
  fuseport ops list
  fuseport ops check --quick
  fuseport ops check --ops my_ops.py
  fuseport ops build
  fuseport ops bench selective_scan --json bench.json
\b
Exit codes of check: 0 pass, 1 a check failed, 5 nothing could be checked here, 6 a check could not
be made.
"""

_DOCTOR = """\b
Example:
  fuseport doctor
"""


class _Commands(click.Group):
    """Turns errors into one line and the exit code that belongs to them."""

    def invoke(self, ctx: click.Context) -> Any:
        debug = bool(ctx.params.get("debug"))
        if not debug:
            warnings.simplefilter("ignore")  # torch's own, about things its users cannot change
        try:
            return super().invoke(ctx)
        except FuseportError as error:
            _fail(error, error.exit_code, debug=debug)
        except OSError as error:
            wrapped = StorageError(f"{error.filename or 'the file system'}: {error.strerror}")
            _fail(wrapped, wrapped.exit_code, debug=debug)
        except KeyboardInterrupt:
            click.echo("fuseport: interrupted", err=True)
            sys.exit(128 + signal.SIGINT)
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
    sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fuseport")
@click.option("--debug", is_flag=True, help="Show tracebacks and warnings.")
def main(debug: bool) -> None:
    """Export models with fused custom ops, and prove outputs and gradients.

    A checkpoint becomes TorchScript, ONNX and exported programs, for the forward pass and for its
    gradients; every artifact is then compared with the model, in every runtime.
    """
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    # As an exception, so that what was begun is cleaned up on the way out.
    sys.exit(128 + number)


@main.command(epilog=_EXPORT)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the bundle."
)
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@click.option(
    "--input-shapes",
    multiple=True,
    metavar="NAME:[DIM,…]",
    help="Inputs of your own model, once for each; names are dynamic dimensions.",
)
@click.option(
    "--format",
    "format_",
    multiple=True,
    metavar="NAME",
    help="If absent, all but aot_inductor, which takes minutes; `all` for really all.",
)
@click.option(
    "--program", multiple=True, metavar="NAME", help="forward or gradient; both if absent."
)
@click.option("--opset", type=int, metavar="N", help="Of ONNX's standard operators, 18 to 23.")
@click.option("--dtype", metavar="DTYPE", help="Convert the weights to it, bfloat16 for example.")
@click.option("--seed", default=0, show_default=True, help="Of example inputs and samples.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
def export(
    checkpoint: Path,
    output: Path,
    model: str | None,
    input_shapes: tuple[str, ...],
    format_: tuple[str, ...],
    program: tuple[str, ...],
    opset: int | None,
    dtype: str | None,
    seed: int,
    force: bool,
) -> None:
    """Export CHECKPOINT, a file or folder, into a bundle."""
    with _progress() as progress:
        progress("loading torch")
        from fuseport.exporter import api, formats
        from fuseport.exporter.models.user import parse_inputs

        bundle = api.export(
            checkpoint,
            output,
            model=model,
            inputs=parse_inputs(input_shapes) or None,
            format=_formats(format_, formats.FORMATS) or None,
            programs=[_one_of(name, api.PROGRAMS, "program") for name in program] or api.PROGRAMS,
            opset=formats.DEFAULT_OPSET if opset is None else opset,
            dtype=dtype,
            seed=seed,
            force=force,
            progress=progress,
        )
    manifest = bundle.manifest
    for note in manifest["notes"]:
        click.echo(f"note: {note}")
    count = manifest["parameters"]["count"]
    click.echo(f"{manifest['architecture']['name']}, {count:,} parameters → {output}/")
    for name, entry in manifest["files"].items():
        if not name.startswith("samples/"):
            click.echo(f"  {name:<22} {_size(entry['bytes']):>10}")
    click.echo(f"Next: fuseport verify {output}")


@main.command(epilog=_VERIFY)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--runtime", multiple=True, metavar="NAME", help="Default: all that are installed.")
@click.option(
    "--artifact",
    type=click.Path(path_type=Path),
    help="A file made or changed elsewhere, compared instead of the bundle's own.",
)
@click.option(
    "--program", metavar="NAME", help="That the artifact holds, if its name does not say."
)
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@click.option(
    "--json", "json_", type=click.Path(path_type=Path), help="Write the report; - prints it."
)
@click.option(
    "--atol", type=float, help="With --rtol, instead of the rule: |error| ≤ atol + rtol·|truth|."
)
@click.option("--rtol", type=float, help="See --atol; each is 0 if only the other is given.")
@click.option(
    "--timeout", type=float, default=900.0, show_default=True, help="Seconds for one job."
)
@click.option("--memory", type=float, help="GiB that a runtime's process may take.")
@click.option(
    "--trust-native",
    multiple=True,
    metavar="SHA256",
    help="Of a manifest or file whose machine code may be loaded, from now on.",
)
@click.option("--strict", is_flag=True, help="Count what is unsupported as a mismatch.")
def verify(
    bundle: Path,
    runtime: tuple[str, ...],
    artifact: Path | None,
    program: str | None,
    model: str | None,
    json_: Path | None,
    atol: float | None,
    rtol: float | None,
    timeout: float,
    memory: float | None,
    trust_native: tuple[str, ...],
    strict: bool,
) -> None:
    """Compare the artifacts of BUNDLE with its model: outputs and gradients."""
    with _progress() as progress:
        progress("loading torch")
        from fuseport.exporter import api
        from fuseport.exporter.verify.compare import Tolerance
        from fuseport.exporter.verify.run import Limits

        given = atol is not None or rtol is not None
        report = api.verify(
            bundle,
            runtime=runtime or None,
            artifact=artifact,
            program=None if program is None else _one_of(program, api.PROGRAMS, "program"),
            model=model,
            tolerance=Tolerance(atol or 0.0, rtol or 0.0) if given else None,
            limits=Limits(timeout, None if memory is None else int(memory * 2**30)),
            trust_native=trust_native,
            progress=progress,
        )
    printed = json_ is not None and str(json_) == "-"
    if json_ is not None and not printed:
        json_.write_text(report.to_json() + "\n", encoding="utf-8")
    if printed:
        click.echo(report.to_json())
    else:
        _print_report(report)
    sys.exit(report.exit_code(strict=strict))


@main.command(epilog=_BENCH)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--runtime", multiple=True, metavar="NAME", help="Default: all that are installed.")
@click.option("--program", metavar="NAME", help="forward or gradient; both if absent.")
@click.option(
    "--size",
    multiple=True,
    metavar="DIM=N,…",
    help="Of dynamic dimensions; several times for several points. Default: the bundle's cases.",
)
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns.")
@click.option(
    "--json", "json_", type=click.Path(path_type=Path), help="Write the result; - prints it."
)
@click.option(
    "--timeout", type=float, default=900.0, show_default=True, help="Seconds for one turn."
)
def bench(
    bundle: Path,
    runtime: tuple[str, ...],
    program: str | None,
    size: tuple[str, ...],
    model: str | None,
    rounds: int,
    json_: Path | None,
    timeout: float,
) -> None:
    """Time the artifacts of BUNDLE in every runtime, in turns with the model in eager."""
    with _progress() as progress:
        progress("loading torch")
        from fuseport.exporter import api
        from fuseport.exporter.child import Limits

        result = api.bench(
            bundle,
            runtime=runtime or None,
            program=None if program is None else _one_of(program, api.PROGRAMS, "program"),
            sizes=[_sizes(text) for text in size],
            model=model,
            rounds=rounds,
            limits=Limits(timeout),
            progress=progress,
        )
    _write(result, json_, result.reasons())
    sys.exit(result.exit_code())


@main.group(epilog=_OPS)
def ops() -> None:
    """List, check, build and time the fused ops, and ops of your own."""


_NAMES = click.argument("names", nargs=-1, metavar="[NAME]…")
_OWN = click.option(
    "--ops", "own", metavar="FILE", help="Your own: a file, folder or module that defines SPEC(S)."
)
_JSON = click.option(
    "--json", "json_", type=click.Path(path_type=Path), help="Write the result; - prints it."
)


@ops.command("check")
@_NAMES
@_OWN
@click.option("--only", multiple=True, metavar="CHECK", help="Default: all of them.")
@click.option("--quick", is_flag=True, help="Leave out torch.compile and aot_inductor.")
@click.option("--cases", type=click.IntRange(min=1), help="Of each operator, drawn; all if absent.")
@click.option("--seed", default=0, show_default=True, help="Of values, and of drawn cases.")
@_JSON
def ops_check(
    names: tuple[str, ...],
    own: str | None,
    only: tuple[str, ...],
    quick: bool,
    cases: int | None,
    seed: int,
    json_: Path | None,
) -> None:
    """Check ops: values, gradients, fakes, layouts, errors, threads, compilers, ONNX."""
    with _progress() as progress:
        progress("loading torch")
        from fuseport.exporter.op_choice import chosen
        from fuseport.exporter.verify import op_check

        report = op_check.check(
            chosen(names, own), only=only, quick=quick, cases=cases, seed=seed, progress=progress
        )
    _write(report, json_, report.lines())
    sys.exit(report.exit_code())


@ops.command("list")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print a table in Markdown.")
def ops_list(json_: bool, markdown: bool) -> None:
    """List the ops, what each has, and why not where it has not."""
    from fuseport.ops import OPS, support

    if json_:
        click.echo(json.dumps(support.content(OPS.values()), indent=1, ensure_ascii=False))
    elif markdown:
        click.echo(support.markdown(OPS.values()))
    else:
        click.echo(support.text(OPS.values()))


@ops.command("build")
@_NAMES
@_OWN
def ops_build(names: tuple[str, ...], own: str | None) -> None:
    """Compile the native libraries of ops now, instead of on first use."""
    with _progress() as progress:
        progress("loading torch")
        from fuseport.exporter.op_choice import built, chosen

        for line in built(chosen(names, own), progress):
            click.echo(line)


@ops.command("bench")
@_NAMES
@_OWN
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns.")
@_JSON
def ops_bench(names: tuple[str, ...], own: str | None, rounds: int, json_: Path | None) -> None:
    """Time ops natively, in turns with their references in plain torch."""
    with _progress() as progress:
        progress("loading torch")
        from fuseport.exporter.op_bench import bench as timed
        from fuseport.exporter.op_choice import chosen

        result = timed(chosen(names, own), rounds=rounds, progress=progress)
    _write(result, json_, [])


@main.command(epilog=_DOCTOR)
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def doctor(json_: bool) -> None:
    """Say what is here, what is missing, and how to get it."""
    from fuseport.exporter.doctor import diagnose

    diagnosis = diagnose()
    if json_:
        click.echo(json.dumps(diagnosis.to_json(), indent=1))
    else:
        for line in diagnosis.lines():
            click.echo(line)
    sys.exit(0 if diagnosis.ok else 5)


def _print_report(report: Any) -> None:
    console = _console()
    console.print(report.table())
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    failures = report.failures()
    for line in failures[:_LISTED]:
        console.print(line, markup=False)
    if len(failures) > _LISTED:
        console.print(f"… and {len(failures) - _LISTED} more: --json has all of them")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.summary.items() if count)
    console.print(f"{counts or 'nothing compared'} in {report.seconds:.0f} s", markup=False)


def _write(result: Any, file: Path | None, lines: list[str]) -> None:
    """A result as JSON, to a file or printed; or else as a table, with lines below."""
    if file is not None and str(file) == "-":
        click.echo(result.to_json())
        return
    if file is not None:
        file.write_text(result.to_json() + "\n", encoding="utf-8")
    console = _console()
    console.print(result.table())
    for line in lines:
        console.print(line, markup=False)


def _console() -> Any:
    from rich.console import Console

    # A pipe has no width: CI logs are wide, and a folded table is hard to read.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _sizes(text: str) -> dict[str, int]:
    """`length=1024,batch=2` as numbers by dimension."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise UsageError(f"--size {text}: write DIM=N,DIM=N with numbers from 1 up")
        sizes[name.strip()] = int(number)
    return sizes


def _formats(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    return known if "all" in names else tuple(_one_of(n, (*known, "all"), "format") for n in names)


def _one_of(name: str, known: Any, what: str) -> Any:
    if name not in known:
        raise UsageError(f"{name} is not a {what}; there are: {', '.join(known)}")
    return name


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


@contextmanager
def _progress() -> "Iterator[Progress]":
    """Tells what is being done: a moving line in a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        begin = time.monotonic()
        yield lambda message: click.echo(f"{time.monotonic() - begin:6.1f} s  {message}", err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda message: status.update(message)


if __name__ == "__main__":
    main()
