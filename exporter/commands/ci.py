"""`fuseport ci`: what a `fuseport.toml` says, exported and verified."""

import os
import sys
from pathlib import Path

import click

from fuseport.exporter.commands._faces import append_summary
from fuseport.exporter.commands._shared import loading, progress, show

__all__ = ["ci"]

_CI = """\b
Examples:
  fuseport ci --init                    # writes a fuseport.toml to begin with
  fuseport ci
  fuseport ci --config models/fuseport.toml --only mamba-130m
\b
The report folder gets JSON, HTML and JUnit XML for each checkpoint, and summary.json.
Exit code: that of the worst checkpoint, by `fuseport verify --help`: a mismatch before a crash
before what is missing. An expected failure that passes is a mismatch.
"""


@click.command(epilog=_CI)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default="fuseport.toml",
    show_default=True,
    help="The file that says what to export and verify.",
)
@click.option("--only", multiple=True, metavar="NAME", help="A checkpoint of it; default: all.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Folder of the reports; default: as the file says.",
)
@click.option("--init", "begin", is_flag=True, help="Write such a file, with comments, and end.")
@click.argument("others", nargs=-1, metavar="")
def ci(
    config: Path, only: tuple[str, ...], report: Path | None, begin: bool, others: tuple[str, ...]
) -> None:
    """Export and verify all checkpoints of a fuseport.toml, with one exit code."""
    if others:
        raise click.UsageError(f"{others[0]}: give the file as --config {others[0]}")
    if begin:
        from fuseport.exporter.ci import start

        start.write(config)
        click.echo(f"{config}: set the path of a checkpoint in it, then: fuseport ci")
        return
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter.bundle.staging import write_whole
            from fuseport.exporter.ci import run as running
            from fuseport.exporter.ci.config import read

        read_config = read(config)
        folder = report or config.parent / read_config.report
        result = running.run(
            read_config,
            config,
            only=only,
            progress=tell,
            done=lambda outcome: running.write(outcome, folder),
        )
        write_whole(folder / "summary.json", f"{result.to_json()}\n".encode())
    show(result.table(), result.lines())
    append_summary(lambda _: result.markdown())
    show(None, [f"reports are in {folder}{os.sep}"])
    sys.exit(result.exit_code())
