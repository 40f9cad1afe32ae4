"""Planted bugs that are none: why there is nothing to see of them."""

from collections.abc import Collection, Iterable, Mapping

from fuseport.exporter.verify.compare import Expected
from fuseport.exporter.verify.mutants.files import WEIGHTS
from fuseport.exporter.verify.sample import Sample

__all__ = ["unseen"]

# Of what rounding makes of it in the working dtype: a gradient that is zero by mathematics is
# 1e-9 of that in float64, one that is small by itself never so little.
_ZERO = 1e-3


def unseen(
    kind: str, place: str, changed: Collection[str], samples: Iterable[Sample]
) -> str | None:
    """Why a bug that nothing showed is none; None where that is not known.

    A bias before a norm has a gradient that is zero but for rounding: nothing depends on the
    bias, and of the gradient itself there is nothing but rounding to be wrong.

    Args:
        kind: of the catalogue, its name.
        place: of a weight that was changed, its name.
        changed: the outputs and gradients that were not the right ones' bits in some case.
        samples: the cases it was run on.
    """
    if not changed:
        return "it gives the right one's bits in every case: there is nothing to see"
    known = [sample.expected for sample in samples]
    if all(_vanishes(name, known) for name in changed):
        named = ", ".join(sorted(changed))
        return f"what it changes is zero but for rounding, of which none is the right one: {named}"
    if kind in WEIGHTS and _vanishes(f"grad/{place}", known):
        return f"nothing depends on {place}: its gradient is zero but for rounding"
    return None


def _vanishes(name: str, known: Iterable[Mapping[str, Expected]]) -> bool:
    """Whether a tensor is zero but for rounding, in every case that has it, and one has."""
    found = [expected[name] for expected in known if name in expected]
    return bool(found) and all(e.scale.max_abs <= _ZERO * e.baseline.max_abs for e in found)
