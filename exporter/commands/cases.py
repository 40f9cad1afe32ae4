"""`fuseport cases`: plain operators that fused ops are made of, in every runtime and as files."""

import sys
from pathlib import Path

import click

from fuseport.exporter.commands._shared import JSON, loading, names_option, progress, write

__all__ = ["cases"]

_CASES = """\b
Examples:
  fuseport cases list
  fuseport cases check --only conv2d --runtime onnxruntime
  fuseport cases check --json vocabulary.json
  fuseport cases dump cases/ --dtype float64
\b
Exit codes of check: 0 pass, 1 a case failed, 5 nothing could be run here, 6 a result could not be
judged.
"""


@click.group(epilog=_CASES)
def cases() -> None:
    """List plain operators' cases, run them in every runtime, and write them to files."""


_ONLY = names_option("--only", what="An operator; default: all.")


@cases.command("list")
@_ONLY
def cases_list(only: tuple[str, ...]) -> None:
    """List the operators, and their cases where operators are named."""
    from fuseport.exporter.verify.vocabulary.files import entries

    found = entries(only)
    if only:
        for entry in found:
            click.echo(f"{entry.operator}: {entry.name}")
        return
    for operator in dict.fromkeys(entry.operator for entry in found):
        own = [entry for entry in found if entry.operator == operator]
        click.echo(f"{own[0].family:12} {operator:32} {len(own):3} cases")


@cases.command("dump")
@click.argument("folder", type=click.Path(path_type=Path))
@_ONLY
@click.option("--dtype", default="float32", show_default=True, help="Of inputs and cotangents.")
@click.option("--seed", default=0, show_default=True, help="Of values.")
@click.option("--force", is_flag=True, help="Replace cases that are there.")
def cases_dump(folder: Path, only: tuple[str, ...], dtype: str, seed: int, force: bool) -> None:
    """Write inputs, cotangents, float64 outputs and gradients to FOLDER, for any engine to read."""
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter.verify.vocabulary.files import dump

        count = dump(folder, only=only, dtype=dtype, seed=seed, force=force, progress=tell)
    click.echo(f"{folder}: {count} cases")


@cases.command("check")
@_ONLY
@names_option("--runtime", what="Default: those that are quick.")
@click.option("--seed", default=0, show_default=True, help="Of values.")
@JSON
def cases_check(
    only: tuple[str, ...], runtime: tuple[str, ...], seed: int, json_: Path | None
) -> None:
    """Run plain operators, forward and gradient, in every runtime, and hold them to float64."""
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter.verify import vocabulary

        report = vocabulary.check(
            vocabulary.chosen(only), runtime=runtime or None, seed=seed, progress=tell
        )
    write(report, json_, report.lines())
    sys.exit(report.exit_code())
