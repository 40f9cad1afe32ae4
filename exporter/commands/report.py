"""`fuseport report`: a saved report, shown again and judged again."""

import sys
from pathlib import Path

import click

from fuseport.exporter.commands._faces import FACES, TOLERANCES, Faces
from fuseport.exporter.errors import CorruptInput, StorageError, UsageError
from fuseport.exporter.garbage import importing

__all__ = ["report"]

_REPORT = """\b
Examples:
  fuseport report r.json --html report.html --junit junit.xml
  fuseport report r.json --atol 1e-4 --atol 'grad/*.A_log:1e-3'
  fuseport report r.json --rtol 1e-3 --atol 1e-5 --json judged.json
\b
What a saved report decides without a run: every --atol by itself, exactly,
since each row has its largest error. With --rtol it depends on the elements:
a row has the --atol that it needs beside --rtol 1e-6, 1e-5, … 1e-1, and is
decided exactly there, unless it passed and has more than a million elements.
Elsewhere limits follow from these figures and the largest |truth|; a row that
they leave open becomes an error, never a pass: run verify with the same --atol
and --rtol. What differed at later calls and passed then is not in a report. No
tolerance pardons another shape or dtype, NaN, a missing gradient, or zero where
the model has none.
\b
Exit codes: as verify.
"""


@click.command(epilog=_REPORT)
@click.argument("file", type=click.Path(path_type=Path))
@FACES
@TOLERANCES
@click.option("--strict", is_flag=True, help="Count what is unsupported as a mismatch.")
def report(
    file: Path,
    json_: Path | None,
    html: Path | None,
    junit: Path | None,
    markdown: Path | None,
    atol: tuple[str, ...],
    rtol: tuple[str, ...],
    strict: bool,
) -> None:
    """Show FILE, the JSON of a verification, again; with tolerances, judge it again."""
    with importing():
        from fuseport.exporter.verify.rejudge import rejudged
        from fuseport.exporter.verify.report import Report
        from fuseport.exporter.verify.tolerances import parsed

    tolerances = parsed(atol, rtol)
    faces = Faces(json_, html, junit, markdown)
    faces.check()
    if any(path.resolve() == file.resolve() for path in (json_, html, junit, markdown) if path):
        raise UsageError(f"{file}: the report itself; write to another file")
    try:
        shown = Report.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{file}: there is no such file; verify --json writes one") from error
    except (CorruptInput, UnicodeDecodeError) as error:
        raise CorruptInput(f"{file}: {error}") from error
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}") from error
    if tolerances is not None:
        shown = rejudged(shown, tolerances)
    sys.exit(faces.write(shown, strict=strict))
