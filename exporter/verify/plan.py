"""What is to be compared: cases, and the jobs that runtimes do on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fuseport.exporter import runtimes

__all__ = ["REPEATS", "Case", "Job", "admitted", "cases", "jobs"]

REPEATS = 3
"""How often a job calls its artifact: an op was once right twice and wrong at the third call."""

_ODD = (3, 7, 11, 13, 17)
_MOVED_UP = 16
_EDGE = 65  # one step past the chunk of 64 after which scans save their state


@dataclass(frozen=True)
class Case:
    """One set of inputs to compare on.

    Attributes:
        name: in reports.
        sizes: of each dynamic dimension.
        layout: of floating inputs and cotangents in memory, see `runtimes._layouts`.
        seed: of the values.
    """

    name: str
    sizes: Mapping[str, int]
    layout: str
    seed: int


@dataclass(frozen=True)
class Job:
    """One artifact on one case in one runtime.

    Attributes:
        runtime: its name.
        artifact: the file; the bundle's weights for a runtime of the model itself.
        program: `forward` or `gradient`: what is compared.
        way: `run` the artifact, or `autograd` through it.
        case: the case's name.
    """

    runtime: str
    artifact: Path
    program: str
    way: Literal["run", "autograd"]
    case: str


def cases(sizes: Mapping[str, int], seed: int) -> tuple[Case, ...]:
    """The shapes of the export, and held-out shapes chosen to break coincidences.

    Args:
        sizes: of the export, by dynamic dimension.
        seed: of the first case; the others count up from it.
    """
    ones = dict.fromkeys(sizes, 1)
    odd = dict(zip(sizes, (_ODD[i % len(_ODD)] for i in range(len(sizes))), strict=True))
    edge = {name: 1 if name == "batch" else _EDGE for name in sizes}
    drafts: list[tuple[str, Mapping[str, int], str]] = [
        ("export", sizes, "contiguous"),
        ("export, cotangents of stride 0", sizes, "expanded"),
    ]
    if sizes:
        drafts += [
            ("every dimension 1", ones, "contiguous"),
            ("odd, transposed", odd, "transposed"),
            ("past a chunk, sliced", edge, "sliced"),
        ]
    else:
        drafts.append(("export, transposed", sizes, "transposed"))
    return tuple(
        Case(name, dict(s), layout, seed + i) for i, (name, s, layout) in enumerate(drafts)
    )


def admitted(
    planned: Sequence[Case], admits: Callable[[Mapping[str, int]], bool]
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The cases at sizes for which a program holds, moved up to the next such sizes if need be.

    Args:
        planned: from `cases`.
        admits: whether the program holds for these sizes; see `Program.admits`.

    Returns:
        The cases, and a sentence on each that could not be kept.
    """
    kept: list[Case] = []
    notes: list[str] = []
    for case in planned:
        nearby = ({n: size + up for n, size in case.sizes.items()} for up in range(_MOVED_UP + 1))
        sizes = next((sizes for sizes in nearby if admits(sizes)), None)
        if sizes is None:
            notes.append(f"not compared, {case.name}: the program holds for no sizes near it")
        elif sizes == case.sizes:
            kept.append(case)
        else:
            at = ", ".join(f"{name} {size}" for name, size in sizes.items())
            kept.append(Case(f"{case.name}, moved up to {at}", sizes, case.layout, case.seed))
    return tuple(kept), tuple(notes)


def jobs(
    folder: Path,
    manifest: Mapping[str, Any],
    chosen: Sequence[str],
    names: Sequence[str],
    *,
    rebuilt: bool,
) -> Iterator[Job]:
    """Every artifact of a bundle in every runtime that runs its format, forward and gradient.

    Args:
        folder: of the bundle.
        manifest: of the bundle.
        chosen: runtimes.
        names: of the cases.
        rebuilt: whether the model itself can be run.
    """
    for name in chosen:
        runtime = runtimes.get(name)
        if runtime.FORMAT is None:
            if rebuilt:
                weights = folder / "weights.safetensors"
                yield from (Job(name, weights, "forward", "run", case) for case in names)
                yield from (Job(name, weights, "gradient", "autograd", case) for case in names)
            continue
        for entry in manifest["artifacts"]:
            if entry["format"] == runtime.FORMAT:
                yield from of_artifact(name, folder / entry["file"], entry["program"], names)


def of_artifact(runtime: str, file: Path, program: str, names: Sequence[str]) -> Iterator[Job]:
    """One artifact in one runtime: by itself and, forward programs, through autograd too."""
    yield from (Job(runtime, file, program, "run", case) for case in names)
    if program == "forward" and runtimes.get(runtime).AUTOGRAD:
        yield from (Job(runtime, file, "gradient", "autograd", case) for case in names)
