"""`fuseport ops`: the registered ops, and ops of the user's own."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from fuseport.exporter.commands._shared import JSON, OPS, loading, progress, write
from fuseport.exporter.errors import UsageError

__all__ = ["ops"]

_OPS = """\b
Examples:
  fuseport ops list
  fuseport ops check --quick
  fuseport ops check --ops my_ops.py
  fuseport ops check swiglu --mutants --quick
  fuseport ops build
  fuseport ops bench selective_scan --json bench.json
\b
Exit codes of check: 0 pass, 1 a check failed, 5 nothing could be checked here, 6 a check could not
be made. With --mutants: 0 if at least 99 % of the planted bugs are caught and there is no false
alarm, or else 1.
"""


@click.group(epilog=_OPS)
def ops() -> None:
    """List, check, build and time the fused ops, and ops of your own."""


_NAMES = click.argument("names", nargs=-1, metavar="[NAME]…")


@ops.command("check")
@_NAMES
@OPS
@click.option("--only", multiple=True, metavar="CHECK", help="Default: all of them.")
@click.option(
    "--mutants", is_flag=True, help="Verify the checks: plant bugs in the ops, one at a time."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Leave out torch.compile and aot_inductor; of mutants, one of each kind.",
)
@click.option("--cases", type=click.IntRange(min=1), help="Of each operator, drawn; all if absent.")
@click.option("--seed", default=0, show_default=True, help="Of values, and of drawn cases.")
@JSON
def ops_check(
    names: tuple[str, ...],
    own: str | None,
    only: tuple[str, ...],
    mutants: bool,
    quick: bool,
    cases: int | None,
    seed: int,
    json_: Path | None,
) -> None:
    """Check ops: values, gradients, fakes, layouts, errors, threads, compilers, ONNX."""
    if mutants and (only or cases):
        raise UsageError("--mutants makes all checks on all cases: leave out --only and --cases")
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter.user_code.op_choice import chosen
            from fuseport.exporter.verify.op_check import isolated

        if mutants:
            from fuseport.exporter.verify import mutants as planting

            specs = [spec.name for spec in chosen(names, own)]
            runs = 1 if quick else 2
            found: Any = planting.check(
                specs, own, quick=quick, runs=runs, seed=seed, progress=tell
            )
        else:
            found = isolated.check(
                [spec.name for spec in chosen(names, own)],
                own,
                only=only,
                quick=quick,
                cases=cases,
                seed=seed,
                progress=tell,
            )
    write(found, json_, found.lines())
    sys.exit(found.exit_code())


@ops.command("list")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print a table in Markdown.")
def ops_list(json_: bool, markdown: bool) -> None:
    """List the ops, what each has, and why not where it has not."""
    from fuseport import ops as every
    from fuseport.ops import support

    specs = every.OPS.values()
    if json_:
        click.echo(json.dumps(support.content(specs), indent=1, ensure_ascii=False))
    elif markdown:
        click.echo(support.markdown(specs))
    else:
        click.echo(support.text(specs))


@ops.command("build")
@_NAMES
@OPS
def ops_build(names: tuple[str, ...], own: str | None) -> None:
    """Compile the native libraries of ops now, instead of on first use."""
    lines: list[str] = []
    try:
        with progress() as tell:
            with loading(tell):
                from fuseport.exporter.user_code.op_choice import built, chosen

            lines.extend(built(chosen(names, own)))
    finally:  # one that cannot be built does not undo the others
        for line in lines:
            click.echo(line)


@ops.command("bench")
@_NAMES
@OPS
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
)
@click.option("--compile", "compiled", is_flag=True, help="Beside torch.compile, too.")
@JSON
def ops_bench(
    names: tuple[str, ...],
    own: str | None,
    rounds: int,
    dtype: str,
    compiled: bool,
    json_: Path | None,
) -> None:
    """Time ops natively, in turns with their references in plain torch."""
    with progress(timed=True) as tell:
        with loading(tell):
            import torch

        from fuseport.exporter.bench.ops import bench as timed
        from fuseport.exporter.user_code.op_choice import chosen

        result = timed(
            chosen(names, own),
            rounds=rounds,
            dtype=getattr(torch, dtype),
            compiled=compiled,
            progress=tell,
        )
    write(result, json_, result.lines())
