"""A baseline of more computations, where the first leaves it open whether a result is wrong.

What values on the other side of a kink explain is no error either; see `kinks`.

The errors of a tensor's elements are at times all of one cause, such as the rounding of one sum
that everything else depends on: then the baseline is the largest of few errors, and small at times
by luck, however large the tensor is. What is beyond its bound by a small factor is held against
further computations before it is called wrong; these change nothing for what is.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter.bundle.staging import work_folder
from fuseport.exporter.child.spent import Spent
from fuseport.exporter.models import Model
from fuseport.exporter.verify import baseline, truth
from fuseport.exporter.verify.kinks import chosen
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample, opened
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["SecondLook"]


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
    _jumps: dict[str, truth.Jumps] = field(default_factory=dict)
    _explained: dict[str, int] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """What of this the reader should know, a sentence each."""
        return tuple(
            f"{case}: {count} {'tensors are' if count > 1 else 'tensor is'} the model's but for "
            "values that lie within a rounding of a kink, as of relu at zero or of the next in an "
            "order, and on its other side in the runtime"
            for case, count in self._explained.items()
        )

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
        wrong = _wrong(rows, tolerances)
        if not wrong:
            return rows
        name, given = sample.case.name, answer
        model = functools.cache(self.rebuild)
        with work_folder() as folder:
            for known in self._jumps_of(answer, sample, wrong, model):
                jumps = [*known.found.values()]
                other = _on_the_models_side(given, sample, jumps, wrong, folder)
                again = tuple(judged(other, sample, program, tolerances))
                if not _wrong(again, tolerances) or _doubtful(again, tolerances):
                    answer, rows = other, again
                    break
            for number in range(baseline.ROUNDS):
                if not _doubtful(rows, tolerances):
                    break
                if (name, number) not in self._wider:
                    self.progress(f"more computations of the baseline: {name}")
                    with self.spent.on("baseline"):
                        self._wider[name, number] = truth.further(model(), sample, number)
                sample = self._wider[name, number]
                rows = tuple(judged(answer, sample, program, tolerances))
        if answer is not given and not _wrong(rows, tolerances):
            self._explained[name] = self._explained.get(name, 0) + len(wrong)
        return rows

    def _jumps_of(
        self, answer: Answer, sample: Sample, wrong: Sequence[Row], model: Callable[[], Model]
    ) -> Iterator[truth.Jumps]:
        """Those known of other answers, and then, where there are more, those of this one."""
        name = sample.case.name
        known = self._jumps.get(name)
        if answer.job.program != "gradient" and not sample.chooses:  # outputs have no jumps then
            return
        if known is None or not known.whole:
            if known is not None:
                yield known
            self.progress(f"both sides of kinks: {name}")
            with self.spent.on("baseline"):
                off = _off(answer, sample, wrong)
                known = self._jumps[name] = truth.jumps(model(), sample, off, known)
        if known.found:
            yield known


def _off(answer: Answer, sample: Sample, wrong: Sequence[Row]) -> dict[str, Tensor]:
    """By gradient, what the first call is off by, over the square of what is allowed.

    In units of the largest of these.
    """
    bounds = {row.tensor: row.bound for row in wrong if row.bound}
    off: dict[str, Tensor] = {}
    if answer.calls:
        found = dict(answer.tensors(min(answer.calls)))
        with opened(sample) as exact:
            for name in bounds.keys() & found.keys():
                if name.startswith("grad/"):
                    off[name] = (found[name].double() - exact(name)) / bounds[name] ** 2
    largest = max((float(t.abs().max()) for t in off.values() if t.numel()), default=0.0)
    return {name: (t / largest).float() for name, t in off.items()} if largest else {}


def _on_the_models_side(
    answer: Answer,
    sample: Sample,
    jumps: Sequence[Mapping[str, Tensor]],
    wrong: Sequence[Row],
    folder: Path,
) -> Answer:
    """The answer without the jumps that it differs from the truth by, in files of their own."""
    bounds = {row.tensor: row.bound or 1.0 for row in wrong if row.tensor in jumps[0]}
    calls: dict[int, Path] = {}
    with opened(sample) as exact:
        for call in answer.calls or {}:
            tensors = dict(answer.tensors(call))
            known = {name: bound for name, bound in bounds.items() if name in tensors}
            off = _flat({name: tensors[name].double() - exact(name) for name in known}, known)
            for number in chosen(off, [_flat(jump, known) for jump in jumps]):
                for name in tensors.keys() & jumps[number].keys():
                    found = tensors[name]
                    tensors[name] = (found - jumps[number][name]).to(found.dtype)
            calls[call] = folder / f"{call}.safetensors"
            save_file({name: t.contiguous() for name, t in tensors.items()}, calls[call])
    return replace(answer, calls=calls)


def _flat(tensors: Mapping[str, Tensor], bounds: Mapping[str, float]) -> Tensor:
    """Those that have bounds, in units of them, as one vector of float64."""
    parts = [tensors[name].double().reshape(-1) / bound for name, bound in bounds.items()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def _wrong(rows: Sequence[Row], tolerances: Tolerances | None) -> list[Row]:
    """What fails by its bound of the baseline."""
    return [
        row
        for row in rows
        if row.verdict == "fail"
        and row.share is not None
        and (tolerances is None or tolerances.of(row.tensor) is None)
    ]


def _doubtful(rows: Sequence[Row], tolerances: Tolerances | None) -> bool:
    """Whether something fails, and all that does is beyond a bound of the baseline by little."""
    wrong = [row for row in rows if row.verdict == "fail"]
    by_bound = _wrong(rows, tolerances)
    return (
        bool(wrong) and by_bound == wrong and all(_share(row) <= baseline.DOUBTFUL for row in wrong)
    )


def _share(row: Row) -> float:
    return math.inf if row.share is None else row.share
