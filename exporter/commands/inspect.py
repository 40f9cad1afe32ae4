"""`fuseport inspect`: what a checkpoint, a bundle or an artifact is."""

import sys
from pathlib import Path

import click

from fuseport.exporter.commands._shared import there
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.garbage import importing

__all__ = ["inspect"]

_INSPECT = """\b
Examples:
  fuseport inspect model.ckpt
  fuseport inspect vim.pth --weights model_ema --tensors
  fuseport inspect bundle/ --json
  fuseport inspect bundle/gradient.onnx other.safetensors
\b
Exit codes: 0; 4 also where a bundle's files are not as its manifest says. Of several: the first
that is not 0.
"""


@click.command(epilog=_INSPECT)
@click.argument("paths", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="PATH…")
@click.option("--weights", metavar="NAME", help="Which of several sets in a checkpoint to look at.")
@click.option("--tensors", is_flag=True, help="List every tensor of a checkpoint.")
@click.option("--json", "json_", is_flag=True, help="Print JSON, an object for each PATH.")
def inspect(paths: tuple[Path, ...], weights: str | None, tensors: bool, json_: bool) -> None:
    """Say what each PATH is: a checkpoint, a bundle or an artifact. Nothing of it is run."""
    if len(paths) == 1:
        there(*paths)
    with importing():
        from fuseport.exporter.inspect import inspect as inspected

    codes = []
    for path in paths:
        try:
            result = inspected(path, weights=weights, tensors=tensors)
        except FuseportError as error:
            if len(paths) == 1:
                raise
            click.echo(f"fuseport: {error}", err=True)
            codes.append(error.exit_code)
            continue
        for line in [result.to_json()] if json_ else result.lines():
            click.echo(line)
        codes.append(result.exit_code())
    sys.exit(next((code for code in codes if code), 0))
