"""Decisions that spare work where there is none: `if mask.any(): out[mask] = expert(x[mask])`.

What they guard does nothing where they come out otherwise, so that one way is right for both. That
is tried: the model goes that way at inputs where by itself it would not, and gives the same.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fuseport.exporter.capture.decisions import MOST, Decision, Run
from fuseport.exporter.program.rounding import close

__all__ = ["guards"]


def guards(runs: Sequence[Run]) -> dict[str, bool]:
    """What such decisions may always come to, by name.

    Args:
        runs: call the model, with other answers for some of its decisions, each on other inputs.

    Returns:
        Those that came out both ways at these inputs, and one way of which gave the same outputs as
        the model's own at all of them. All decisions of a place, as of a loop, are taken together.
    """
    natural: list[tuple[Run, Sequence[Decision], Sequence[Tensor]]] = []
    for run in runs:
        try:
            natural.append((run, *run({})))
        except Exception:  # the model's own, which may take no such sizes
            continue
    values: dict[str, set[bool]] = {}
    for _, made, _ in natural:
        for decision in made:
            values.setdefault(decision.place, set()).add(decision.value)
    found: dict[str, bool] = {}
    for place in (place for place, seen in values.items() if len(seen) == 2):
        for way in (True, False):
            answers = {Decision(place, time, way).name: way for time in range(MOST)}
            if all(_same(run, {**found, **answers}, outputs) for run, _, outputs in natural):
                found |= answers
                break
    return found


def _same(run: Run, answers: Mapping[str, bool], expected: Sequence[Tensor]) -> bool:
    try:
        _, outputs = run(answers)
    except Exception:  # the model's own: that is no way that it can always go
        return False
    if len(outputs) != len(expected):
        return False
    return all(close(ours, theirs, 0.0) for ours, theirs in zip(outputs, expected, strict=True))
