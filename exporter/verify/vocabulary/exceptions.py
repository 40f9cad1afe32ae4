"""What runtimes and formats cannot do of the vocabulary, each with the reason.

The table is strict: what is stated here and passes fails the suite, so that nothing stays in it
that is mended.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fuseport.exporter.verify.vocabulary.report import PlainRow

__all__ = ["EXCEPTIONS", "Stated", "applied", "stated"]


@dataclass(frozen=True)
class Stated:
    """Something that is unsupported.

    Attributes:
        operator, case, runtime, program: of the rows that it is about; patterns of fnmatch.
        reason: why, in a sentence.
        torch: the versions that it is about, as of a requirement; none are all.
    """

    operator: str
    reason: str
    case: str = "*"
    runtime: str = "*"
    program: str = "*"
    torch: str = ""

    def about(self, row: PlainRow) -> bool:
        """Whether it is about a row."""
        pairs = (
            (row.operator, self.operator),
            (row.case, self.case),
            (row.runtime, self.runtime),
            (row.program, self.program),
        )
        here = Version(torch.__version__)
        return SpecifierSet(self.torch).contains(here, prereleases=True) and all(
            fnmatchcase(name, pattern) for name, pattern in pairs
        )


EXCEPTIONS: tuple[Stated, ...] = ()
"""None at present."""


def stated(row: PlainRow) -> Stated | None:
    """What is stated of a row; the first that is about it."""
    return next((entry for entry in EXCEPTIONS if entry.about(row)), None)


def applied(rows: Iterator[PlainRow]) -> Iterator[PlainRow]:
    """The rows as the table has them: what is stated is unsupported, all else passes or fails."""
    for row in rows:
        entry = stated(row)
        if entry is None:
            if row.verdict == "unsupported":
                reason = f"unsupported, and not stated in the exceptions: {row.reason}"
                row = replace(row, verdict="fail", reason=reason)
        elif row.verdict == "pass":
            reason = f"stated as unsupported, but it passes; take it out: {entry.reason}"
            row = replace(row, verdict="fail", reason=reason)
        else:
            found = f"{row.verdict}: {row.reason}"
            row = replace(row, verdict="unsupported", reason=entry.reason, found=found)
        yield row
