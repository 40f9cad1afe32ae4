"""Where the time of a verification goes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

__all__ = ["OF_CHILD", "PARTS", "Spent"]

PARTS = ("opening", "truth", "baseline", "loading", "running", "comparing", "localising")
"""What time is spent on: opening the bundle and building its model; the truth in float64, once for
each case; the equally good computations that it is measured by; starting runtimes and loading
artifacts; their calls; all that handing over and comparing takes, in either process; and looking
into failures."""

OF_CHILD = ("loading", "running", "comparing")
"""Those that a runtime's process spends."""


class Spent:
    """Seconds by part. Runtimes compute at the same time, and while results are compared, so that
    their sum can be more than what passes on the clock."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._at: list[str] = []
        self._since = monotonic()

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the time that the context takes; within another one, it is not that one's."""
        self._count()
        self._at.append(part)
        try:
            yield
        finally:
            self._count()
            self._at.pop()

    def add(self, other: Mapping[str, float]) -> None:
        """Count what another process has spent, by part."""
        for part, seconds in other.items():
            self.seconds[part] += seconds

    def _count(self) -> None:
        now = monotonic()
        if self._at:
            self.seconds[self._at[-1]] += now - self._since
        self._since = now
