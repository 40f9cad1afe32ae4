"""What samples cannot judge, and samples that judge nothing."""

from collections.abc import Sequence

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.verify.measure import is_finite_somewhere
from fuseport.exporter.verify.plan import Case
from fuseport.exporter.verify.sample import Sample, opened

__all__ = ["doubts", "of_use", "require_some"]


def require_some(samples: Sequence[Sample]) -> None:
    """Refuses samples that nothing could ever be held against.

    Raises:
        ExportFailed: the model runs none of the cases, or none of those of an entry.
    """
    for entry in dict.fromkeys(sample.case.entry for sample in samples):
        refused = [s.refused for s in samples if s.case.entry == entry]
        if all(refused):
            raise ExportFailed(
                f"{entry}: it was captured, but the model itself refuses all {len(refused)} cases "
                f"on which artifacts would be compared, so nothing could be verified: {refused[0]}"
            )


def doubts(samples: Sequence[Sample], planned: Sequence[Case] = ()) -> list[str]:
    """Notes on what nothing can be held against: what the model does not run, what it gives
    nothing finite of, or not twice, and what depends on a choice that rounding decides; of the
    `planned` cases, those that have no sample."""
    notes = [
        f"not compared, {sample.case.name}: {sample.refusal}"
        for sample in samples
        if sample.refused is not None
    ]
    there = [sample.case.name for sample in samples]
    lost = [case.name for case in planned if case.name not in there]
    notes += [f"not compared, {name}: the model gives nothing there to hold on to" for name in lost]
    if nowhere := {sample.case.name: found for sample in samples if (found := _nowhere(sample))}:
        outputs = ", ".join(sorted({name for found in nowhere.values() for name in found}))
        notes.append(
            f"{', '.join(nowhere)}: the model itself gives nothing finite in {outputs}; verify "
            "compares nothing there: give inputs of which it does (bounds of integers, --inputs)"
        )
    if names := {name for sample in samples for name in sample.unstable}:
        first, *more = sorted(names, key=lambda name: (name.startswith("grad/"), name))
        others = f", and {len(more)} tensors more" if more else ""
        notes.append(
            f"two runs of the model on the same inputs give another {first}{others}: it draws "
            "random numbers, counts its calls, or adds in no fixed order; verify compares none of "
            "these"
        )
    if undecided := [sample for sample in samples if sample.undecided]:
        cases = ", ".join(sample.case.name for sample in undecided)
        functions = ", ".join(dict.fromkeys(f for sample in undecided for f in sample.undecided))
        notes.append(
            f"{cases}: rounding decides what {functions} gives, from values that are alike; verify "
            "compares nothing there that depends on it: give trained weights, or inputs of which "
            "the values differ (--inputs)"
        )
    return notes


def of_use(sample: Sample) -> bool:
    """Whether the model runs, and every tensor is decided and finite somewhere."""
    if sample.refused is not None or sample.undecided or sample.unstable:
        return False
    stored = [name for name in sample.expected if name not in sample.omitted]
    with opened(sample) as truth:
        return all(is_finite_somewhere(truth(name)) for name in stored)


def _nowhere(sample: Sample) -> list[str]:
    """The outputs that are finite nowhere, of those that are stored."""
    if sample.refused is not None:
        return []
    stored = [n for n in sample.expected if not n.startswith("grad/") and n not in sample.omitted]
    with opened(sample) as truth:
        return [name for name in stored if not is_finite_somewhere(truth(name))]
