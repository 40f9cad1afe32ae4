"""`fuseport bench`: how fast artifacts are, in every runtime."""

import sys
from pathlib import Path

import click

from fuseport.exporter.commands._shared import (
    JSON,
    OPS,
    device_option,
    loading,
    names_option,
    one_of,
    progress,
    write,
)

__all__ = ["bench"]

_BENCH = """\b
Examples:
  fuseport bench bundle/
  fuseport bench bundle/ --size length=1024,batch=1 --program forward --json bench.json
  fuseport bench bundle/ --runtime onnxruntime,onnxruntime+fused
  fuseport bench bundle/ --device cuda
"""


@click.command(epilog=_BENCH)
@click.argument("bundle", type=click.Path(path_type=Path))
@names_option("--runtime", what="Default: all that are installed.")
@click.option("--program", metavar="NAME", help="forward or gradient; both if absent.")
@click.option(
    "--size",
    multiple=True,
    metavar="DIM=N,…",
    help="Of dynamic dimensions; several times for several points. Default: the bundle's cases.",
)
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@OPS
@device_option("Where runtimes compute, eager too.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns.")
@JSON
@click.option(
    "--timeout", type=float, default=900.0, show_default=True, help="Seconds for one turn."
)
def bench(
    bundle: Path,
    runtime: tuple[str, ...],
    program: str | None,
    size: tuple[str, ...],
    model: str | None,
    own: str | None,
    device: str,
    rounds: int,
    json_: Path | None,
    timeout: float,
) -> None:
    """Time the artifacts of BUNDLE in every runtime, in turns with the model in eager."""
    with progress(timed=True) as tell:
        with loading(tell):
            from fuseport.exporter import api
            from fuseport.exporter.child import Limits
            from fuseport.exporter.models.given import parse_sizes
            from fuseport.exporter.program import KINDS

        result = api.bench(
            bundle,
            runtime=runtime or None,
            program=None if program is None else one_of(program, KINDS, "program"),
            sizes=[parse_sizes(text) for text in size],
            model=model,
            ops=own,
            rounds=rounds,
            limits=Limits(timeout),
            device=device,
            progress=tell,
        )
    write(result, json_, result.reasons())
    sys.exit(result.exit_code())
