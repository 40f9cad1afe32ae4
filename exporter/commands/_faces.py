"""The faces of a report: the options that ask for them, and what writes them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fuseport.exporter.commands._shared import show, width
from fuseport.exporter.errors import StorageError, UsageError

if TYPE_CHECKING:
    from fuseport.exporter.verify.report import Report

__all__ = ["FACES", "TOLERANCES", "Faces", "append_summary"]

_SUMMARY = "GITHUB_STEP_SUMMARY"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Faces:
    """Where a report goes, beside the terminal: a file for each face that was asked for.

    `json` may be `-`, standard output, which then has nothing else on it.
    """

    json: Path | None = None
    html: Path | None = None
    junit: Path | None = None
    markdown: Path | None = None

    def check(self) -> None:
        """Raise what writing would raise anyway, before a long run.

        Raises:
            UsageError: two faces have the same file, or another one than JSON is to be printed.
            StorageError: a folder is there, or nothing can be written there.
        """
        given = {name: path for name, path in vars(self).items() if path is not None}
        for name, path in given.items():
            if str(path) == "-" and name == "json":
                continue
            if str(path) == "-":
                raise UsageError(f"--{name} -: only JSON is printed; give a file")
            same = [n for n, p in given.items() if p.absolute() == path.absolute()]
            if len(same) > 1:
                raise UsageError(f"{path}: --{same[0]} and --{same[1]} cannot share a file")
            _check_place(path)

    def write(self, report: "Report", *, strict: bool) -> int:
        """Write every face, and print the report, whatever the verdict is.

        Where `GITHUB_STEP_SUMMARY` is set, Markdown is appended to that file, too.

        Args:
            report: to show.
            strict: whether what is unsupported is a mismatch.

        Returns:
            The command's exit code.

        Raises:
            StorageError: a face could not be written; the others were.
        """
        from fuseport.exporter.bundle.staging import write_whole

        printed = self.json is not None and str(self.json) == "-"
        summary = os.environ.get(_SUMMARY)
        shared = self.markdown and summary and self.markdown.resolve() == Path(summary).resolve()
        made: list[tuple[Path | None, Callable[[], str]]] = [
            (None if printed else self.json, lambda: report.to_json() + "\n"),
            (self.html, report.to_html),
            (self.junit, report.to_junit),
            (None if shared else self.markdown, report.to_markdown),
        ]
        failed: list[StorageError] = []
        for path, face in made:
            if path is not None:
                try:
                    write_whole(path, face().encode(errors="replace"))
                except StorageError as error:
                    failed.append(error)
        try:
            append_summary(lambda taken: _shortened(report, taken))
        except StorageError as error:
            failed.append(error)
        # Last, since what reads it may be gone.
        if printed:
            click.echo(report.to_json())
        else:
            _print(report)
        if failed:
            raise StorageError(str(failed[0]), [str(error) for error in failed[1:]])
        code = report.exit_code(strict=strict)
        if code and not report.exit_code():  # the report itself knows of no --strict
            count = report.summary["unsupported"]
            click.echo(f"not equal under --strict: {count} unsupported", err=True)
        return code


def FACES(command: Command) -> Command:  # noqa: N802  # a decorator like OPS, of four options
    """The options `--json`, `--html`, `--junit` and `--markdown`; the command makes `Faces`."""
    file = click.Path(path_type=Path)
    for option in (
        click.option("--markdown", type=file, help="Write a summary; see GITHUB_STEP_SUMMARY."),
        click.option("--junit", type=file, help="Write JUnit XML, which CI systems show."),
        click.option("--html", type=file, help="Write one page that needs nothing else."),
        click.option("--json", "json_", type=file, help="Write the report; - prints it."),
    ):
        command = option(command)
    return command


def TOLERANCES(command: Command) -> Command:  # noqa: N802
    """The options `--atol` and `--rtol`, each as often as there are tensors."""
    for name, text in (
        ("--rtol", "See --atol; each is 0 where only the other is given."),
        (
            "--atol",
            "With --rtol, instead of the rule: |error| ≤ atol + rtol·|truth|, element by element. "
            "For all tensors, or for those of a name: --atol 1e-5 --atol 'grad/*.bias:1e-4'; "
            "the most specific name counts.",
        ),
    ):
        command = click.option(name, multiple=True, metavar="[NAME:]NUMBER", help=text)(command)
    return command


def _check_place(path: Path) -> None:
    from fuseport.exporter.bundle.staging import resolved

    try:
        target = resolved(path)
        target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{path}: cannot be written: {reason}") from error
    if target.is_dir():
        raise StorageError(f"{path}: cannot be written: a folder is there")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise StorageError(f"{path}: cannot be written: no permission in {target.parent}")


def append_summary(made: Callable[[int], str]) -> None:
    """Append Markdown to the file that `GITHUB_STEP_SUMMARY` names, if it is set.

    Args:
        made: the text, told how many bytes are in the file: one step may verify several bundles.

    Raises:
        StorageError: it cannot be written.
    """
    summary = os.environ.get(_SUMMARY)
    if not summary:
        return
    path = Path(summary)
    try:
        text = made(path.stat().st_size if path.exists() else 0)
        with path.open("ab") as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        raise StorageError(f"{_SUMMARY}: {summary}: {error.strerror}") from error


def _shortened(report: "Report", taken: int) -> str:
    from fuseport.exporter.verify.report.markdown import LIMIT, to_markdown

    return to_markdown(report, LIMIT - taken)


def _print(report: "Report") -> None:
    from fuseport.exporter.verify.report.terminal import lines

    show(report.table(width()), lines(report))
