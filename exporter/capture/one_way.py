"""Decisions by values that come out alike, and of whose other way there is no program.

`if is_global.any():`, where what comes then has sizes that hang on values, of what hardly any input
has. Artifacts go the way that the model goes, and fail where it would go the other one.
"""

from collections.abc import Sequence

from fuseport.exporter.capture.decisions import Captured, Run, means_to_raise
from fuseport.exporter.capture.guards import Natural, by_place
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import one_line

__all__ = ["one_way"]

_MOST = 8  # places


def one_way(gone: Sequence[Natural], captured: Captured) -> dict[str, str]:
    """Why there is no program of the other way of such decisions, by name.

    Args:
        gone: how the model goes at several inputs.
        captured: the program of decisions, which it makes at the first of them.

    Returns:
        Those that came out alike at all of these inputs.
    """
    alike = {place: seen for place, seen in by_place(gone).items() if len(seen) == 1}
    if len(gone) < 2 or len(alike) > _MOST:
        return {}
    found: dict[str, str] = {}
    for place, (value,) in alike.items():
        names = [each.name for _, made, _ in gone for each in made if each.place == place]
        if reason := _why_not(gone[0][0], captured, dict.fromkeys(names, not value)):
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
