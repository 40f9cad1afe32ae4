"""Cases with their truth, on disk: in a bundle, or of one verification."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.verify.compare import Expected
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.plan import Case

__all__ = ["INDEX", "Sample", "Truth", "opened", "read_all", "together", "write_index"]

INDEX = "samples.json"

Truth = Callable[[str], Tensor]


@dataclass(frozen=True)
class Sample:
    """A case with its truth, on disk.

    Attributes:
        case: what was computed.
        file: safetensors with `input/…`, `cotangent/…`, and the truth, `truth/<name>` in float64,
            for outputs and for `grad/<name>`.
        expected: of each output and gradient, what is known beside the truth.
        none: gradients that do not exist: what they are of does not enter the outputs.
        omitted: what was too large to be stored.
        unstable: tensors that differ between two runs of one and the same computation, here or at
            another case: two runs of what draws few random numbers may be alike.
        chooses: whether the model makes integers of numbers.
        undecided: functions that make others of them in most computations of the baseline than in
            the truth.
        absent: of `none`, gradients that there are at another case, as of what a model leaves out
            where a size is 1; programs have zeros of these.
        refused: why the model cannot run this case; nothing else is there then.
    """

    case: Case
    file: Path
    expected: Mapping[str, Expected]
    none: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    chooses: bool = False
    undecided: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def refusal(self) -> str:
        """At which sizes the model does not run, and why."""
        at = ", ".join(f"{name} {size}" for name, size in self.case.sizes.items())
        return f"the model itself refuses {at or 'it'}: {self.refused}"


def together(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples, with what is known of one of them by others of its entry point: what is unstable
    in one is so in all."""
    unstable: dict[str, set[str]] = {}
    there: dict[str, set[str]] = {}
    for sample in samples:
        unstable.setdefault(sample.case.entry, set()).update(sample.unstable)
        there.setdefault(sample.case.entry, set()).update(sample.expected)
    return tuple(
        replace(
            sample,
            unstable=tuple(sorted(unstable[sample.case.entry])),
            absent=tuple(n for n in sample.none if n in there[sample.case.entry]),
        )
        for sample in samples
    )


def write_index(folder: Path, samples: Sequence[Sample]) -> None:
    """Write what the files themselves do not say, for `read_all`."""
    index = [{**asdict(sample), "file": sample.file.name} for sample in samples]
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def read_all(folder: Path) -> tuple[Sample, ...]:
    """The samples of a folder, in the order in which they were computed.

    Raises:
        CorruptInput: the folder holds none.
    """
    index = folder / INDEX
    try:
        entries: list[dict[str, Any]] = json.loads(index.read_text(encoding="utf-8"))
        if not entries:
            raise ValueError("empty")
        return tuple(
            Sample(
                case=Case(**entry["case"]),
                file=folder / entry["file"],
                expected={name: _expected(known) for name, known in entry["expected"].items()},
                none=tuple(entry["none"]),
                omitted=tuple(entry["omitted"]),
                unstable=tuple(entry["unstable"]),
                chooses=entry.get("chooses", False),  # not in bundles of before
                undecided=tuple(entry.get("undecided", ())),
                absent=tuple(entry.get("absent", ())),
                refused=entry["refused"],
            )
            for entry in entries
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptInput(f"{index}: no samples of an export; export again") from error


@contextmanager
def opened(sample: Sample) -> Iterator[Truth]:
    """Name of an output or gradient → its truth; each is read from disk when it is asked for."""
    with safe_open(sample.file, "pt") as file:
        yield lambda name: file.get_tensor(f"truth/{name}")


def _expected(entry: Mapping[str, Any]) -> Expected:
    scale, baseline = Norms(**entry["scale"]), Norms(**entry["baseline"])
    return Expected(**{**entry, "scale": scale, "baseline": baseline})
