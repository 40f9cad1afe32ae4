"""Which ops a model of unknown architecture will likely call, from its tensors' names and shapes.

Each op says what its evidence is (`OpSpec.evidence`); here it is looked for. It is a guess: only
the model's code says what is called.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fuseport.exporter.inspect import known
from fuseport.ops import OPS
from fuseport.ops.evidence import Evidence

__all__ = ["guessed"]

_Shapes = Mapping[str, tuple[int, ...]]


def guessed(shapes: _Shapes) -> list[dict[str, Any]]:
    """The ops, as `known.of_ops` describes them, each with its `evidence`.

    Args:
        shapes: of all tensors, by name.

    Returns:
        For each op: what it has, and under `evidence` for each module that speaks for it: `what` it
        is, in how many `places`, the `tensors` of the first and their shapes.
    """
    # By its last segment, since most names are none that any pattern asks for.
    ends: defaultdict[int, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in shapes:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            ends[count][".".join(parts[-count:])].append(name)
    found: list[dict[str, Any]] = []
    for spec in OPS.values():
        evidence = [e for declared in spec.evidence if (e := _seen(declared, shapes, ends))]
        if evidence:
            (op,) = known.of_ops(Counter({spec.operators[0].qualified_name: 0}))
            found.append({**op, "evidence": evidence})
    return found


def _seen(
    evidence: Evidence, shapes: _Shapes, ends: Mapping[int, Mapping[str, list[str]]]
) -> dict[str, Any] | None:
    """Where evidence is in a checkpoint; None if it is nowhere."""
    places: dict[str, list[str]] | None = None
    for pattern, sizes in evidence.tensors.items():
        here: dict[str, list[str]] = {}
        for module, name in _matches(pattern, ends):
            if _fits(shapes[name], sizes) and (places is None or module in places):
                here.setdefault(module, [*(places or {}).get(module, ()), name])
        places = here
    for pattern in evidence.absent:
        for module, _ in _matches(pattern, ends):
            (places or {}).pop(module, None)
    if not places:
        return None
    first = next(iter(places.values()))
    return {
        "what": evidence.what,
        "places": len(places),
        "tensors": {name: list(shapes[name]) for name in first},
        "absent": list(evidence.absent),
    }


def _matches(
    pattern: str, ends: Mapping[int, Mapping[str, list[str]]]
) -> Iterator[tuple[str, str]]:
    """The modules under which a name fits a pattern, with a dot at their end, and these names."""
    for end, names in ends[pattern.count(".") + 1].items():
        if fnmatchcase(end, pattern):
            yield from ((name.removesuffix(end), name) for name in names)


def _fits(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    return len(shape) == len(sizes) and all(
        size in (None, n) for n, size in zip(shape, sizes, strict=True)
    )
