"""`fuseport doctor`: what is here and what is missing."""

import json
import sys

import click

from fuseport.exporter.garbage import importing

__all__ = ["doctor"]

_DOCTOR = """\b
Example:
  fuseport doctor
"""


@click.command(epilog=_DOCTOR)
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def doctor(json_: bool) -> None:
    """Say what is here, what is missing, and how to get it."""
    with importing():
        from fuseport.exporter.doctor import diagnose

    diagnosis = diagnose()
    if json_:
        click.echo(json.dumps(diagnosis.to_json(), indent=1))
    else:
        for line in diagnosis.lines():
            click.echo(line)
    sys.exit(0 if diagnosis.ok else 5)
