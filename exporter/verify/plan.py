"""What is to be compared: cases, and the jobs that runtimes do on them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fuseport.exporter import runtimes
from fuseport.exporter.program import Entry, entry_of

__all__ = [
    "GIVEN",
    "REPEATS",
    "Case",
    "Job",
    "admitted",
    "cases",
    "conditional",
    "far",
    "jobs",
    "larger",
    "seeded",
    "ungraded",
    "unseeded",
]

GIVEN = "as given"
"""The case of the user's own inputs."""

REPEATS = 3
"""How often a job calls its artifact: an op was once right twice and wrong at the third call."""

_NOTHING = "masks of zeros"
_ODD = (3, 7, 11, 13, 17)
_MOVED_UP = 16
_TOGETHER = 3  # dimensions that are moved up each by itself
_LARGER = 64  # than the export's
_FAR = 4096
_READABLE = 100  # characters of a condition
_LISTED = 3  # gradients that there are none of
_SEED = ", seed "
_APART = 1_000_003  # cases of one bundle have seeds that count up
_EDGE = 65  # one step past the chunk of 64 after which scans save their state


@dataclass(frozen=True)
class Case:
    """One set of inputs to compare on.

    Attributes:
        name: in reports.
        sizes: of each dynamic dimension.
        layout: of floating inputs and cotangents in memory, see `runtimes._layouts`.
        seed: of the values.
        entry: what of the model takes these inputs.
        nothing: whether inputs that are masks are all 0, and select nothing.
    """

    name: str
    sizes: Mapping[str, int]
    layout: str
    seed: int
    entry: Entry = "forward"
    nothing: bool = False


@dataclass(frozen=True)
class Job:
    """One artifact on one case in one runtime.

    Attributes:
        runtime: its name.
        artifact: the file; the bundle's weights for a runtime of the model itself.
        program: `forward`, `gradient` or `step`: what is compared.
        way: `run` the artifact, or `autograd` through it; or, of either, the forms in which
            backward can be asked for.
        case: the case's name.
    """

    runtime: str
    artifact: Path
    program: str
    way: Literal["run", "autograd", "forms", "autograd forms"]
    case: str


def cases(
    sizes: Mapping[str, int],
    seed: int,
    entry: Entry = "forward",
    *,
    given: bool = False,
    masks: Collection[str] = (),
    grows: Collection[str] = (),
    together: Collection[Sequence[int | str]] = (),
) -> tuple[Case, ...]:
    """The shapes of the export, and held-out shapes chosen to break coincidences.

    Args:
        sizes: of the export, by dynamic dimension.
        seed: of the first case; the others count up from it.
        entry: what of the model; a step has no gradient, so no cotangents.
        given: whether there are inputs of the user's own, at `sizes`.
        masks: inputs of zeros and ones.
        grows: dimensions of a step's states that are 0 before the first token.
        together: the dimensions of each input. Past a chunk are the last two at most: a film of 65
            frames of 65 × 65 takes more memory than a machine has.
    """
    ones = dict.fromkeys(sizes, 1)
    odd = dict(zip(sizes, (_ODD[i % len(_ODD)] for i in range(len(sizes))), strict=True))
    edge = {name: 1 if name == "batch" else _EDGE for name in sizes}
    for dims in together:
        long = [name for name in dims if isinstance(name, str) and edge.get(name, 1) > 1]
        edge |= dict.fromkeys(long[:-2], _ODD[0])
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
    if len(sizes) > 1:
        # Of a length of 1 there are no steps but the first: what a runtime computes of none can be
        # right for the first of a batch, and for no other.
        several = "batch" if "batch" in sizes else next(iter(sizes))
        drafts.append((f"{several} 2, all else 1", {**ones, several: 2}, "contiguous"))
    if given:
        drafts.append((GIVEN, sizes, "contiguous"))
    if masks:
        drafts.append((_NOTHING, sizes, "contiguous"))
    if grows:
        drafts.append(("first token", {**sizes, **dict.fromkeys(grows, 0)}, "contiguous"))
    if entry == "step":
        drafts = [
            (f"step, {name}", s, layout) for name, s, layout in drafts if layout != "expanded"
        ]
    return tuple(
        Case(name, dict(s), layout, seed + i, entry, _NOTHING in name)
        for i, (name, s, layout) in enumerate(drafts)
    )


def far(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes of which one is far beyond those of all cases, and a multiple of the export's.

    What a program does not hold for there is an upper limit: no case is that large.
    """
    for name, size in sizes.items():
        yield {**sizes, name: size * _FAR}


def admitted(
    planned: Sequence[Case], admits: Callable[[Mapping[str, int]], bool]
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The cases at sizes for which a program holds, moved up to the next such sizes if need be.

    A program of a larger example, such as a network's that halves its input many times, holds for
    none of these: its cases have the sizes of the export, but for one that is larger.

    Args:
        planned: from `cases`, the first one at the sizes of the export.
        admits: whether the program holds for these sizes; see `conditions.admits`.

    Returns:
        The cases, and a sentence on each that could not be kept.
    """
    kept: list[Case] = []
    notes: list[str] = []
    for turn, case in enumerate(planned):
        sizes = _moved_up(case.sizes, admits)
        moved = "to" if sizes is None else "up to"
        if sizes is None:
            sizes = _beside(planned[0].sizes, case.sizes, turn, admits)
        if sizes is None:
            said = "the program holds for no sizes near it, as one of a larger example may: --size"
            notes.append(f"not compared, {case.name}: {said}")
        elif sizes == case.sizes:
            kept.append(case)
        else:
            at = ", ".join(f"{name} {size}" for name, size in sizes.items())
            kept.append(replace(case, name=f"{case.name}, moved {moved} {at}", sizes=sizes))
    return tuple(kept), tuple(notes)


def _beside(
    usual: Mapping[str, int],
    wanted: Mapping[str, int],
    turn: int,
    admits: Callable[[Mapping[str, int]], bool],
) -> dict[str, int] | None:
    """The sizes of the export, but for those that are wanted and admitted, and one larger one.

    Args:
        usual: the sizes of the export.
        wanted: those of the case.
        turn: cases that come in turn have another one larger.
        admits: whether the program holds for these sizes.

    Returns:
        None where there are no others than the export's.
    """
    sizes = dict(usual)
    for name, size in wanted.items():
        if admits({**sizes, name: size}):
            sizes[name] = size
    others = [name for name in sizes if sizes[name] != wanted[name]]
    if any(size > 1 for size in wanted.values()):
        for number in range(len(others)):
            name = others[(turn + number) % len(others)]
            for size in range(usual[name] + 1, usual[name] + _LARGER + 1):
                if admits({**sizes, name: size}):
                    return {**sizes, name: size}
    return sizes if sizes != usual else None


def _moved_up(
    wanted: Mapping[str, int], admits: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """The next sizes that are admitted, from these upwards; None where none is near."""
    sizes = next(filter(admits, _nearby(wanted)), None)
    if sizes is not None and len(sizes) > _TOGETHER:
        for name, size in wanted.items():  # back to it, if it was moved for others' sake alone
            lower = ({**sizes, name: less} for less in range(size, sizes[name]))
            sizes = next(filter(admits, lower), sizes)
    return sizes


def _nearby(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes and larger ones, in the order of what is added to them altogether.

    All of them are moved together where there are too many dimensions to try.
    """
    steps = range(_MOVED_UP + 1)
    ups = product(steps, repeat=len(sizes)) if len(sizes) <= _TOGETHER else ()
    for up in sorted(ups, key=sum) or [(step,) * len(sizes) for step in steps]:
        yield {name: size + more for (name, size), more in zip(sizes.items(), up, strict=True)}


def ungraded(programs: Mapping[str, Any]) -> list[str]:
    """A note on gradients that there are none of, by a manifest's programs.

    Of these, that an artifact gives none, as the model does, is what is compared.
    """
    program = programs.get("gradient")
    if program is None or not program["none"]:
        return []
    absent = list(program["none"])
    if not any(output["name"].startswith("grad/") for output in program["outputs"]):
        return ["there is no gradient at all: the program's outputs depend on nothing by autograd"]
    more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
    named = ", ".join(absent[:_LISTED])
    return [f"there is no {named}{more}: the program's outputs do not depend on that by autograd"]


def without_products(manifest: Mapping[str, Any]) -> list[str]:
    """A note on ONNX files that no CPU runs, by a manifest."""
    files = [e["file"] for e in manifest["artifacts"] if e["format"].startswith("onnx")]
    if not files or "bfloat16" not in manifest["parameters"]["dtypes"]:
        return []
    return [
        f"{', '.join(files)}: ONNX Runtime has no products in bfloat16 on the CPU, so that verify "
        "says unsupported there; for the CPU export with --dtype float32"
    ]


def conditional(program: str, facts: Mapping[str, Any], places: Sequence[str] = ()) -> str:
    """A sentence on what a program does not hold for.

    Args:
        program: its name.
        facts: of the manifest: `conditions`, and in `unchecked` those that artifacts do not check.
        places: where model code asks for what is not so there.
    """
    at = f" at {', '.join(places)}" if places else ""
    unseen = facts.get("unchecked", ())
    otherwise = "elsewhere its artifacts refuse"
    if unseen:
        otherwise += f", but for {_readable(unseen)}: there they may give something else unnoticed"
    return (
        f"{program}: compared only where {_readable(facts['conditions'])}, which torch took for "
        f"granted{at}; {otherwise}"
    )


def larger(program: str, sizes: Mapping[str, int]) -> list[str]:
    """A note on sizes at which the model does run, and a program does not hold; none without any.

    Args:
        program: its name.
        sizes: of dimensions, by name.
    """
    if not sizes:
        return []
    said = " ".join(f"--size {name}={size}" for name, size in sizes.items())
    return [f"{program}: the model runs at larger sizes, too: export with {said} for those"]


def _readable(conditions: Sequence[str]) -> str:
    said = [condition for condition in conditions if len(condition) <= _READABLE]
    if longer := len(conditions) - len(said):
        hold = (
            "condition of the manifest holds" if longer == 1 else "conditions of the manifest hold"
        )
        said.append(f"{longer} longer {hold}")
    return " and ".join(said)


def seeded(
    planned: Sequence[Case], seeds: Sequence[int], refused: Collection[str] = ()
) -> list[Case]:
    """The cases with other values too: sizes and layouts are the same.

    Args:
        planned: of an export.
        seeds: 0 stands for the cases as they are; others are drawn anew, but for the user's own
            inputs, which have no other values.
        refused: names of those that the model cannot run, whatever the values.
    """
    return [
        replace(case, name=f"{case.name}{_SEED}{n}", seed=case.seed + n * _APART) if n else case
        for n in seeds
        for case in planned
        if not n or case.name not in {GIVEN, *refused}
    ]


def unseeded(case: Case) -> str:
    """The name of the case of which this one differs in its seed alone; its own, where none."""
    return case.name.partition(_SEED)[0]


def jobs(
    folder: Path,
    manifest: Mapping[str, Any],
    chosen: Sequence[str],
    names: Mapping[Entry, Sequence[str]],
    *,
    rebuilt: bool,
    forms: bool = False,
) -> Iterator[Job]:
    """Every artifact of a bundle in every runtime that runs its format, and the model's own.

    Args:
        folder: of the bundle.
        manifest: of the bundle.
        chosen: runtimes.
        names: of the cases of each entry.
        rebuilt: whether the model itself can be run.
        forms: whether to ask for backward in all its forms, too, on one case.
    """
    for name in chosen:
        runtime = runtimes.get(name)
        found: list[tuple[Path, str]] = []
        if runtime.FORMAT is None and rebuilt:
            found += ((folder / "weights.safetensors", entry) for entry in names)
        for entry in manifest["artifacts"]:
            if entry["format"] == runtime.FORMAT:
                found.append((folder / entry["file"], entry["program"]))
        for file, program in found:
            yield from of_artifact(name, file, program, names, forms=forms)


def of_artifact(
    runtime: str,
    file: Path,
    program: str,
    names: Mapping[Entry, Sequence[str]],
    *,
    forms: bool = False,
) -> Iterator[Job]:
    """One artifact in one runtime: by itself and, forward programs, through autograd too."""
    own = names.get(entry_of(program), ())
    yield from (Job(runtime, file, program, "run", case) for case in own)
    if program == "forward" and runtimes.get(runtime).AUTOGRAD:
        yield from (Job(runtime, file, "gradient", "autograd", case) for case in own)
        if forms and own:
            yield Job(runtime, file, "gradient", "autograd forms", _small(own))
    if program == "gradient" and forms and own:
        yield Job(runtime, file, "gradient", "forms", _small(own))


def _small(names: Sequence[str]) -> str:
    """A case of few values, none of them alone in its dimension, where there is one."""
    return next((name for name in names if name.startswith("odd")), names[0])
