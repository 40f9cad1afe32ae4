"""Decisions that spare work where there is none: `if mask.any(): out[mask] = expert(x[mask])`.

What they guard does nothing where they come out otherwise, so that one way is right for both. That
is tried: the model goes that way at inputs where by itself it would not, and gives the same.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fuseport.exporter.capture.decisions import MOST, Decision, Run
from fuseport.exporter.program.rounding import close

__all__ = ["Natural", "by_place", "guards", "natural"]


Natural = tuple[Run, Sequence[Decision], Sequence[Tensor]]
"""A run, and what the model decides and returns in it if it is told nothing."""


def natural(runs: Iterable[Run]) -> list[Natural]:
    """How the model goes by itself, where it does.

    Args:
        runs: call the model, with other answers for some of its decisions, each on other inputs.
    """
    found: list[Natural] = []
    for run in runs:
        try:
            found.append((run, *run({})))
        except Exception:  # the model's own, which may take no such sizes
            continue
    return found


def by_place(gone: Sequence[Natural]) -> dict[str, set[bool]]:
    """What decisions came to. All of a place, as of a loop, are taken together."""
    values: dict[str, set[bool]] = {}
    for decision in (decision for _, made, _ in gone for decision in made):
        values.setdefault(decision.place, set()).add(decision.value)
    return values


def guards(gone: Sequence[Natural]) -> dict[str, bool]:
    """What such decisions may always come to, by name.

    Args:
        gone: how the model goes at several inputs.

    Returns:
        Those that came out both ways at these inputs, and one way of which gave the same outputs as
        the model's own at all of them.
    """
    found: dict[str, bool] = {}
    for place in (place for place, seen in by_place(gone).items() if len(seen) == 2):
        for way in (True, False):
            answers = {Decision(place, time, way).name: way for time in range(MOST)}
            if all(_same(run, {**found, **answers}, outputs) for run, _, outputs in gone):
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
