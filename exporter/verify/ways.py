"""Which ways a model went that decides by values: what it computes otherwise is not compared."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import safe_open

from fuseport.exporter.capture import went
from fuseport.exporter.models.model import Model, at
from fuseport.exporter.program import entry_of
from fuseport.exporter.verify.sample import Sample

__all__ = ["untaken"]


def untaken(
    model: Model, samples: Sequence[Sample], programs: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """A note on each decision that came out alike in all cases.

    Args:
        model: that was exported.
        samples: the cases.
        programs: the manifest's; `both_ways` of one are the places of its decisions.
    """
    notes: list[str] = []
    for name, program in programs.items():
        places = program.get("both_ways", ())
        if not places:
            continue
        entry = entry_of(name)
        came = _came(at(model, entry), [s for s in samples if s.case.entry == entry])
        notes += (
            f"{place} comes to {value} in every case: what is computed otherwise was held against "
            "the model in the export, in its outputs alone, and in no runtime; give --inputs for "
            f"which it comes to {not value}"
            for place in places
            for value in sorted(came[place])
            if len(came[place]) == 1
        )
    return notes


def _came(model: Model, samples: Sequence[Sample]) -> dict[str, set[bool]]:
    """What the decisions at each place came to."""
    found: dict[str, set[bool]] = defaultdict(set)
    for sample in samples:
        if sample.refused is not None:
            continue
        with safe_open(sample.file, "pt") as file:
            inputs = {spec.name: file.get_tensor(f"input/{spec.name}") for spec in model.inputs}
        made, _ = went(model, inputs, {})
        for decision in made:
            found[decision.place].add(decision.value)
    return found
