"""`fuseport calibrate`: tolerances from runs that are known to be good."""

import sys
from pathlib import Path

import click

from fuseport.exporter.commands._shared import JSON, OPS, loading, names_option, progress

__all__ = ["calibrate"]

_CALIBRATE = """\b
Examples:
  fuseport calibrate bundle/
  fuseport calibrate bundle/ --runtime onnxruntime --seeds 10 --json calibration.json
  fuseport calibrate bundle/ >> fuseport.toml
\b
It verifies the bundles by the rule, with other values than any verification has, and proposes twice
the largest error, a line for each tensor of a layer. Exit codes are those of verify; where a run is
not good, nothing is proposed.
"""


@click.command(epilog=_CALIBRATE)
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1, required=True)
@names_option("--runtime", what="Default: all that are installed.")
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@OPS
@click.option(
    "--seeds", default=5, show_default=True, type=click.IntRange(min=2), help="Sets of values."
)
@click.option(
    "--margin",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=1.0),
    help="How many times the largest error.",
)
@JSON
def calibrate(
    bundles: tuple[Path, ...],
    runtime: tuple[str, ...],
    model: str | None,
    own: str | None,
    seeds: int,
    margin: float,
    json_: Path | None,
) -> None:
    """Propose tolerances for BUNDLES, as a section of fuseport.toml."""
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter.bundle.staging import write_whole
            from fuseport.exporter.calibrate import calibrate as calibrated

        result = calibrated(
            bundles,
            runtime=runtime or None,
            model=model,
            ops=own,
            seeds=seeds,
            margin=margin,
            progress=tell,
        )
    for report in result.reports:
        for line in report.failures():
            click.echo(line, err=True)
    if result.exit_code() != 0:
        click.echo("fuseport: these runs are not known to be good: nothing is proposed", err=True)
        sys.exit(result.exit_code())
    if json_ is not None and str(json_) != "-":
        write_whole(json_, f"{result.to_json()}\n".encode())
    click.echo(result.to_json() if str(json_) == "-" else result.to_toml(), nl=False)
