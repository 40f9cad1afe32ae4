"""What a verification found: rows, and what they amount to."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fuseport.exporter.verify.compare import Verdict, share
from fuseport.exporter.verify.diagnosis import Diagnosis

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FLOAT64", "OWN_BACKWARD", "Report", "Row"]

FLOAT64 = "float64"
"""The name that stands in the runtime's place where truth is held against stored truth."""

OWN_BACKWARD = "own backward"
"""The way of gradients that autograd functions of the model's own give, by their own backward."""


@dataclass(frozen=True)
class Row:
    """One tensor of one program, case and runtime.

    `tensor` is `*` where the whole job has one verdict. `way` says how a gradient was had: `run` of
    a gradient program, `autograd` through a forward one, or `own backward`, autograd through the
    model where it has autograd functions of its own; `forms` and `autograd forms` are of the other
    ways to ask either for it, with the form in the tensor's place. `crash` marks an error of a
    runtime that died. The figures are those of `compare.Judgement`.
    """

    runtime: str
    provider: str | None
    artifact: str
    program: str
    way: str
    case: str
    tensor: str
    verdict: Verdict
    reason: str | None = None
    crash: bool = False
    max_abs_error: float | None = None
    rms_error: float | None = None
    baseline_error: float | None = None
    bound: float | None = None
    rms_bound: float | None = None
    would_pass_at: float | None = None
    scale: float | None = None
    atol_at_rtol: Mapping[str, float] | None = field(default=None, hash=False)

    @property
    def share(self) -> float | None:
        """How much of its bound the error takes: above 1 it fails. None where there is no error."""
        return share(self.max_abs_error, self.bound, self.rms_error, self.rms_bound)


@dataclass(frozen=True)
class Report:
    """All rows of a verification, and where it ran.

    Attributes:
        bundle: the folder, as given.
        manifest_sha256: of its manifest.
        environment: versions and machine.
        seconds: how long it took.
        results: the rows.
        notes: what the reader should know, a sentence each.
        diagnoses: of failures: where they begin, and who is at fault.
        spent: seconds by what they were spent on, see `spent.PARTS`; runtimes compute while others'
            results are compared, so that the sum may be more than `seconds`.
    """

    bundle: str
    manifest_sha256: str
    environment: Mapping[str, Any]
    seconds: float
    results: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Of the whole: `pass`, `fail`, `error`, `unsupported`, or `nothing compared`."""
        known = {0: "pass", 1: "fail", 5: "unsupported"}.get(self.exit_code())
        return known or ("error" if self.summary["error"] else "nothing compared")

    @property
    def summary(self) -> dict[str, int]:
        """How many rows have each verdict."""
        counts = Counter(row.verdict for row in self.results)
        return {verdict: counts[verdict] for verdict in ("pass", "fail", "unsupported", "error")}

    def exit_code(self, *, strict: bool = False) -> int:
        """0 pass, 1 mismatch, 6 a runtime crashed; the first of these that applies.

        Nothing compared is an error, never a pass: 6 then, or 5 where all is unsupported, also of
        one program alone, as of a model whose outputs are others in each run. That float64 agrees
        with itself is no comparison, nor is it that a runtime agrees with itself, where nothing
        that it gives can be held against the model's.
        """
        verdicts = {row.verdict for row in self.results}
        if "fail" in verdicts or (strict and "unsupported" in verdicts):
            return 1
        if "error" in verdicts:
            return 6
        if not self._compared():
            return 6
        if self.uncompared():
            return 5
        return 0

    def uncompared(self) -> tuple[str, ...]:
        """The programs of which nothing was compared in any runtime; `*` stands for all."""
        compared = self._compared()
        programs = [name for name in compared if name != "*"] or list(compared)
        return tuple(name for name in programs if "pass" not in compared[name])

    def _compared(self) -> dict[str, set[str]]:
        """By program, the verdicts of what may be held against the model."""
        found: dict[str, set[str]] = {}
        for row in self.results:
            if row.runtime != FLOAT64 and not (row.verdict == "pass" and row.way.endswith("forms")):
                found.setdefault(row.program, set()).add(row.verdict)
        return found

    # The faces, each in a file of its own. They import what they need when they are asked for.

    def to_json(self) -> str:
        """JSON, version 1: see README. Infinity and NaN, which JSON lacks, are null."""
        from fuseport.exporter.verify.report.json import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """A report that `to_json` wrote.

        Raises:
            CorruptInput: it is not one.
        """
        from fuseport.exporter.verify.report.json import from_json

        return from_json(text)

    def to_junit(self) -> str:
        """JUnit XML, for CI systems: a suite for each artifact, a case for each tensor."""
        from fuseport.exporter.verify.report.junit import to_junit

        return to_junit(self)

    def to_markdown(self) -> str:
        """A summary in Markdown, short enough for a step of GitHub's."""
        from fuseport.exporter.verify.report.markdown import to_markdown

        return to_markdown(self)

    def to_html(self) -> str:
        """A page that needs nothing beside itself, no network either."""
        from fuseport.exporter.verify.report.html import to_html

        return to_html(self)

    def table(self, width: int = 80) -> "Table":
        """For a terminal: a line for each artifact in each runtime, with its worst tensor.

        Args:
            width: in columns; names of tensors are shortened to fit.
        """
        from fuseport.exporter.verify.report.terminal import table

        return table(self, width)

    def failures(self) -> list[str]:
        """A line for each row that is no pass: the worst verdicts first, then the worst errors."""
        from fuseport.exporter.verify.report.terminal import failures

        return failures(self)

    def left_out(self) -> list[str]:
        """A line on the runtimes and files of which nothing was compared, where others' was."""
        from fuseport.exporter.verify.report.terminal import left_out

        return left_out(self)
