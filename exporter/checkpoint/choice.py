"""Which weights of a checkpoint are taken: those that were named, or the only ones there are."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.checkpoint.content import Candidate, only_tensors, show
from fuseport.exporter.errors import UsageError

__all__ = ["choose", "shapes"]

# What data parallelism, torch.compile and torch.optim.swa_utils add to names and entries.
_ADDED = re.compile(r"(?<![^.])(module|_orig_mod)\.")
_COUNTERS = frozenset(["n_averaged"])
_LISTED = 12


def choose(
    path: Path, held: int, candidates: Sequence[Candidate], wanted: str | None
) -> tuple[str, dict[str, Tensor], tuple[str, ...]]:
    """The name of the weights that are taken, their tensors, and what a user should know.

    Args:
        path: of the checkpoint.
        held: bytes of its files.
        candidates: the usual one first.
        wanted: the name of one; or, where one holds several models under attributes, the prefix of
            one, alone or after the candidate's name and a dot. None to take what is there.

    Raises:
        UsageError: nothing is called `wanted`; or it is None and two fit the same model.
        CorruptInput: the tensors are not dense.
    """
    if wanted is None:
        chosen = _only(path, candidates)
        others = [c.name for c in candidates if c is not chosen]
        notes = tuple(
            f"{show(name)} is in the file too, with other shapes; the weights of"
            f" {show(chosen.name)} are taken (--weights)"
            for name in others
        )
        tensors, more = only_tensors(path, show(chosen.name), chosen.entries, held)
        return chosen.name, tensors, (*notes, *more)
    for candidate in candidates:
        if candidate.name == wanted:
            return wanted, *only_tensors(path, show(wanted), candidate.entries, held)
    for candidate in candidates:
        prefix = wanted.removeprefix(f"{candidate.name}.")
        if prefix == wanted and len(candidates) > 1:
            continue
        under = {
            name: value
            for name, value in candidate.entries.items()
            if isinstance(name, str) and name.startswith(f"{prefix}.")
        }
        if any(isinstance(value, Tensor) for value in under.values()):
            return wanted, *only_tensors(path, show(wanted), under, held)
    raise UsageError(
        f"{show(path)}: --weights {show(wanted)}: there are {_list(candidates)}, and no prefix of"
        " names is called so; give one of these"
    )


def _only(path: Path, candidates: Sequence[Candidate]) -> Candidate:
    first = candidates[0]
    wanted = shapes(first.entries)
    # Each is looked through once, under however many names it is.
    each = {id(c.entries): c.entries for c in candidates}
    equal = {key for key, entries in each.items() if shapes(entries) == wanted}
    same = [c for c in candidates if id(c.entries) in equal]
    if len(same) > 1:
        raise UsageError(
            f"{show(path)}: weights of equal shapes under {_list(same)}; choose by --weights"
            f" {show(same[0].name)} or --weights {show(same[1].name)}"
        )
    return first


def shapes(entries: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a state dict by the names without what training adds to them."""
    return {
        _ADDED.sub("", name): tuple(value.shape)
        for name, value in entries.items()
        if isinstance(name, str)
        and isinstance(value, Tensor)
        and not value.is_nested  # it has none; whoever takes it refuses it
        and name not in _COUNTERS
    }


def _list(candidates: Sequence[Candidate]) -> str:
    listed = [
        f"{show(c.name, 80)} ({c.what})" if c.what else show(c.name, 80)
        for c in candidates[:_LISTED]
    ]
    more = f" and {len(candidates) - _LISTED} more" if len(candidates) > _LISTED else ""
    return " and ".join(listed) + more if len(listed) == 2 else ", ".join(listed) + more
