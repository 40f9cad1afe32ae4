"""Where a wrong value begins: a search over a graph, by looking at few of its values at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Found", "first_wrong", "region", "selected"]

Needs = Mapping[str, Sequence[str]]
"""Each value, by name, and those that it is computed from; in an order that has those first."""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        value: a wrong value, nothing before which is known to be wrong.
        within: the values between it and those that are known to be right, itself included, in
            order: none of them can be seen.
        right: the right values which these are computed from, as far as they were looked at.
        vanished: it was wrong, and was right once the values before it were looked at.
    """

    value: str
    within: tuple[str, ...]
    right: tuple[str, ...]
    vanished: bool = False
    rounds: int = field(default=0, compare=False)


def first_wrong(
    needs: Needs,
    target: str,
    sizes: Mapping[str, int],
    wrong: Callable[[Sequence[str]], set[str]],
    budget: int,
    known: frozenset[str] = frozenset(),
) -> Found:
    """The first wrong value among those that `target` is computed from.

    All values that the result is directly computed from are right, or cannot be seen. That holds
    whether or not a wrong value makes all later ones wrong, since each round goes back from a wrong
    value, and stops only at right ones.

    Args:
        needs: the graph.
        target: a value known to be wrong.
        sizes: bytes of each value that can be looked at; no others are.
        wrong: looks at values, all at once, and says which of them are wrong.
        budget: bytes that may be looked at in one round.
        known: values taken to be right.
    """
    right = set(known)
    value, rounds = target, 0
    while True:
        inside = region(needs, value, right)
        unseen = [name for name in inside if name in sizes and name not in right and name != value]
        if not unseen:
            return Found(value, tuple(inside), _edge(needs, inside, right), rounds=rounds)
        chosen = selected(needs, inside, unseen, sizes, budget)
        also = [value] if value in sizes else []
        found = wrong([*chosen, *also])
        rounds += 1
        if also and value not in found and not found:
            within = region(needs, value, right)
            return Found(value, tuple(within), _edge(needs, within, right), True, rounds)
        right |= set(chosen) - found
        value = next((name for name in chosen if name in found), value)


def region(needs: Needs, value: str, right: set[str] | frozenset[str]) -> list[str]:
    """What `value` is computed from without going through right values, and itself, in order."""
    inside = {value}
    waiting = [value]
    while waiting:
        for name in needs[waiting.pop()]:
            if name not in inside and name not in right:
                inside.add(name)
                waiting.append(name)
    return [name for name in needs if name in inside]


def selected(
    needs: Needs,
    inside: Sequence[str],
    unseen: Sequence[str],
    sizes: Mapping[str, int],
    budget: int,
) -> list[str]:
    """As many values as the budget allows, spread over the region; at least one.

    Where not all fit, the region is cut into parts, and of each part that value is taken which has
    the fewest values beside it that are still needed after it: what leaves a layer, and not the
    slice of a weight.
    """
    if sum(sizes[name] for name in unseen) <= budget:
        return list(unseen)
    width = _alive(needs, inside)
    parts = min(len(unseen), max(2, budget * len(unseen) // sum(sizes[n] for n in unseen)))
    chosen: list[str] = []
    spent = 0
    for i in range(parts):
        part = unseen[i * len(unseen) // parts : (i + 1) * len(unseen) // parts]
        best = min(part, key=lambda name: (width[name], sizes[name]))
        if chosen and spent + sizes[best] > budget:
            continue
        chosen.append(best)
        spent += sizes[best]
    return chosen


def _alive(needs: Needs, inside: Sequence[str]) -> dict[str, int]:
    """After each value, how many values up to it are needed later."""
    place = {name: i for i, name in enumerate(inside)}
    last = dict(place)
    for name in inside:
        for needed in needs[name]:
            if needed in place:
                last[needed] = max(last[needed], place[name])
    ends = [0] * (len(inside) + 1)
    for until in last.values():
        ends[until] += 1
    alive, widths = 0, {}
    for i, name in enumerate(inside):
        alive += 1
        widths[name] = alive
        alive -= ends[i]
    return widths


def _edge(needs: Needs, inside: Sequence[str], right: set[str]) -> tuple[str, ...]:
    found = dict.fromkeys(n for name in inside for n in needs[name] if n in right)
    return tuple(found)
