"""A baseline of more computations, where the first leaves it open whether a result is wrong.

The errors of a tensor's elements are at times all of one cause, such as the rounding of one sum
that everything else depends on: then the baseline is the largest of few errors, and small at times
by luck, however large the tensor is. What is beyond its bound by a small factor is held against
further computations before it is called wrong; these change nothing for what is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.models import Model
from fuseport.exporter.verify import truth
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["SecondLook"]

# The largest share of its bound that a right result is thought to take, by an unlucky baseline. In
# half-normal errors with one cause, one of 10⁵ takes more of what six computations allow.
_DOUBTFUL = 8.0
_ROUNDS = 3  # of `baseline.FURTHER` computations each


@dataclass
class SecondLook:
    """Further computations of a model, made when they are asked for.

    Attributes:
        rebuild: the model; it is not kept, since it can be large.
        progress: told of each step.
        spent: to count the time in.
    """

    rebuild: Callable[[], Model]
    progress: Callable[[str], None]
    spent: Spent
    _wider: dict[tuple[str, int], Sample] = field(default_factory=dict)

    def judged(
        self,
        answer: Answer,
        sample: Sample,
        program: Mapping[str, Any],
        tolerances: Tolerances | None,
        rows: tuple[Row, ...],
    ) -> tuple[Row, ...]:
        """The rows of a job, judged again where all that fails is in doubt.

        Arguments are those of `rows.judged`, and what it gave.
        """
        model: Model | None = None
        for number in range(_ROUNDS):
            if not _doubtful(rows, tolerances):
                break
            key = sample.case.name, number
            if key not in self._wider:
                self.progress(f"more computations of the baseline: {sample.case.name}")
                with self.spent.on("baseline"):
                    model = model or self.rebuild()
                    self._wider[key] = truth.further(model, sample, number)
            sample = self._wider[key]
            rows = tuple(judged(answer, sample, program, tolerances))
        return rows


def _doubtful(rows: Sequence[Row], tolerances: Tolerances | None) -> bool:
    """Whether something fails, and all that does is beyond a bound of the baseline by little."""
    wrong = [row for row in rows if row.verdict == "fail"]
    return bool(wrong) and all(
        row.share is not None
        and row.share <= _DOUBTFUL
        and (tolerances is None or tolerances.of(row.tensor) is None)
        for row in wrong
    )
