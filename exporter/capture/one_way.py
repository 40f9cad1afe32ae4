"""Decisions by values that come out alike, and of whose other way there is no program.

`if is_global.any():`, where what comes then has sizes that hang on values, of what hardly any input
has. Artifacts go the way that the model goes, and fail where it would go the other one.
"""

from collections.abc import Sequence

from fuseport.exporter.capture.decisions import Captured, Decision, Run, means_to_raise
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import one_line

__all__ = ["one_way"]

_MOST = 8  # places


def one_way(runs: Sequence[Run], captured: Captured) -> dict[str, str]:
    """Why there is no program of the other way of such decisions, by name.

    Args:
        runs: call the model, with other answers for some of its decisions, each on other inputs.
        captured: the program of decisions, which the first of the runs makes.

    Returns:
        Those that came out alike at all of these inputs. All decisions of a place, as of a loop,
        are taken together.
    """
    natural: list[Sequence[Decision]] = []
    for run in runs:
        try:
            made, _ = run({})
        except Exception:  # the model's own, which may take no such sizes
            continue
        natural.append(made)
    values: dict[str, set[bool]] = {}
    for decision in (decision for made in natural for decision in made):
        values.setdefault(decision.place, set()).add(decision.value)
    alike = [place for place, seen in values.items() if len(seen) == 1]
    if len(natural) < 2 or len(alike) > _MOST:
        return {}
    found: dict[str, str] = {}
    for place in alike:
        names = [each.name for made in natural for each in made if each.place == place]
        (value,) = values[place]
        if reason := _why_not(runs[0], captured, dict.fromkeys(names, not value)):
            found |= dict.fromkeys(names, reason)
    return found


def _why_not(run: Run, captured: Captured, turned: dict[str, bool]) -> str:
    """Why a way is in no program; nothing where it is in one, or the model means to raise there."""
    try:
        made, _ = run(turned)
    except Exception as error:  # the model's own
        return "" if means_to_raise(error) else one_line(error)
    try:
        captured(made)
    except ExportFailed as error:
        return str(error)
    return ""
