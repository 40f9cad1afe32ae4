"""How fast each artifact of a bundle runs, in every runtime, and how much memory that takes.

Each runtime has a process of its own, and takes turns with another process that runs the model in
eager: a ratio compares what ran within the same second or so, so that a busy or throttled machine
disturbs both alike.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from fuseport.exporter import runtimes
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.child import Child, Limits, pauses
from fuseport.exporter.errors import UsageError
from fuseport.exporter.models.model import example
from fuseport.exporter.program import Entry, TensorSpec, entry_of
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.sample import read_all

__all__ = ["EAGER", "SCHEMA", "Bench", "Point", "Timing", "measure", "of_job", "points", "without"]

SCHEMA = "fuseport.bench/1"
EAGER = "eager"

_TURN_SECONDS = 0.1  # of calls before the other process has its turn
_MOST_CALLS = 200
_PAUSE_SECONDS = 0.02  # between turns: some runtimes' threads spin for a while after a call


@dataclass(frozen=True)
class Point:
    """Inputs to time at.

    Attributes:
        sizes: of each dynamic dimension.
        file: safetensors with `input/…` and `cotangent/…`, contiguous.
        entry: what of the model takes them.
    """

    sizes: Mapping[str, int]
    file: Path
    entry: Entry = "forward"


@dataclass(frozen=True)
class Timing:
    """One artifact at one point in one runtime.

    Attributes:
        runtime, artifact, program, way: as in `verify.report.Row`.
        sizes: of each dynamic dimension.
        seconds: of one call, the median of all.
        fastest: the least of all, in seconds.
        ratio: to eager's time for the same, the median of those of the turns; None without eager.
        peak_bytes: the most memory that the runtime's processes have had resident.
        calls: that were timed.
        reason: why there is no time.
        error: whether that is an error, and not a limit of the runtime's.
    """

    runtime: str
    artifact: str
    program: str
    way: str
    sizes: Mapping[str, int]
    seconds: float | None = None
    fastest: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    calls: int = 0
    reason: str | None = None
    error: bool = False


@dataclass(frozen=True)
class Bench:
    """All timings of a bundle, and where they were taken."""

    bundle: str
    manifest_sha256: str
    rounds: int
    results: tuple[Timing, ...]
    environment: Mapping[str, Any]

    def exit_code(self) -> int:
        """0; 6 if a runtime failed, or nothing was timed."""
        failed = any(timing.error for timing in self.results)
        return 6 if failed or not any(timing.seconds for timing in self.results) else 0

    def reasons(self) -> list[str]:
        """Why there is no time, or no ratio, a line for each reason."""
        why = {(t.runtime, t.artifact, t.reason): t for t in self.results if t.reason is not None}
        found = [f"{runtime}: {artifact}: {reason}" for runtime, artifact, reason in why]
        timed = [timing for timing in self.results if timing.seconds]
        if timed and all(timing.ratio is None for timing in timed):
            found.append("nothing beside eager: that is the model itself, by its code: --model")
        return found

    def to_json(self) -> str:
        """Version 1 of the format that README describes."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def table(self) -> Table:
        """For a terminal."""
        caption = "to eager: the median over turns, each beside eager's own in the same second"
        table = Table(box=box.HORIZONTALS, pad_edge=False, caption=caption, caption_justify="left")
        table.add_column("runtime, artifact")
        for title in ("time", "to eager", "peak memory"):
            table.add_column(title, justify="right")
        heading = None
        for timing in sorted(self.results, key=_order):
            here = (timing.program, tuple(timing.sizes.items()))
            if here != heading:
                heading = here
                at = ", ".join(f"{name} {size}" for name, size in timing.sizes.items())
                table.add_row(Text(f"{timing.program}, {at}" if at else timing.program, "bold"))
            way = ", autograd" if timing.way == "autograd" else ""
            name = Text(f"  {timing.runtime}: {timing.artifact}{way}")
            if timing.seconds is None:
                style = "magenta" if timing.error else "yellow"
                table.add_row(name, Text("error" if timing.error else "unsupported", style))
                continue
            ratio = "" if timing.ratio is None else f"{timing.ratio:.2f} ×"
            peak = "" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**20:,.0f} MiB"
            table.add_row(name, _milliseconds(timing.seconds), ratio, peak)
        return table


def _order(timing: Timing) -> tuple[Any, ...]:
    return timing.program, sorted(timing.sizes.items()), timing.runtime != EAGER


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def points(
    bundle: Bundle, sizes: Sequence[Mapping[str, int]], seed: int, folder: Path
) -> list[Point]:
    """Where to time: at `sizes`, or at those of the bundle's cases; the smallest first.

    Args:
        bundle: whose manifest knows the inputs.
        sizes: of some dynamic dimensions; the others are as at the export. Empty for the cases.
        seed: of the values.
        folder: for the tensors.

    Raises:
        UsageError: a dimension is unknown, or a cotangent's shape cannot be told.
    """
    samples = [s for s in read_all(bundle.folder / "samples") if s.refused is None]
    entries = dict.fromkeys(sample.case.entry for sample in samples)
    found = {e: [dict(s.case.sizes) for s in samples if s.case.entry == e] for e in entries}
    exported = {name: size for sizes_ in found.values() for name, size in sizes_[0].items()}
    for given in sizes:
        for name in set(given) - set(exported):
            known = ", ".join(exported) or "none"
            raise UsageError(f"{name} is no dynamic dimension of the bundle; there are: {known}")
    result: list[Point] = []
    for entry, cases in found.items():
        wanted = [{n: given.get(n, size) for n, size in cases[0].items()} for given in sizes]
        distinct = {tuple(sorted(w.items())): w for w in wanted or cases}.values()
        ordered = sorted(distinct, key=lambda w: (torch.Size(w.values()).numel(), str(w)))
        result += [
            _drawn(bundle, w, seed, folder / f"{entry}{i}.safetensors", entry)
            for i, w in enumerate(ordered)
        ]
    return result


def _drawn(bundle: Bundle, sizes: Mapping[str, int], seed: int, file: Path, entry: Entry) -> Point:
    generator = torch.Generator().manual_seed(seed)
    called = bundle.manifest["programs"][entry]
    tensors = {}
    # What a step takes may be no example of what a model can differentiate: it has no gradient.
    cotangents = _cotangents(called) if entry == "forward" else []
    for kind, entries in (("input", called["inputs"]), ("cotangent", cotangents)):
        for item in entries:
            spec = TensorSpec(**{**item, "dims": tuple(item["dims"])})
            unknown = [dim for dim in spec.dims if isinstance(dim, str) and dim not in sizes]
            if unknown:
                raise UsageError(
                    f"the size {unknown[0]} of {spec.name} depends on the model: only bundles "
                    "whose outputs have the inputs' dynamic dimensions can be timed"
                )
            tensors[f"{kind}/{spec.name}"] = example(spec, sizes, generator)
    save_file(tensors, file)
    return Point(sizes, file, entry)


def _cotangents(program: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [spec for spec in program["outputs"] if "float" in spec["dtype"]]


def _cotangent_names(program: Mapping[str, Any]) -> list[str]:
    return [spec["name"] for spec in _cotangents(program)]


def measure(
    jobs: Sequence[Job],
    at: Sequence[Point],
    programs: Mapping[str, Mapping[str, Any]],
    eager: Path | None,
    folder: Path,
    *,
    rounds: int,
    limits: Limits,
    progress: Callable[[str], None],
) -> Iterator[Timing]:
    """Time one runtime on all its artifacts, in turns with eager.

    Args:
        jobs: of the runtime, one for each artifact, program and way; their cases do not matter.
        at: where.
        programs: by kind, what the manifest says, and what a runtime of the model itself needs.
        eager: the bundle's weights; None where the model cannot be built.
        folder: empty, for this call alone.
        rounds: of turns.
        limits: of each process.
        progress: told of each step.
    """
    with ExitStack() as stack:
        partners: dict[Entry, _Clock] = {}
        for number, job in enumerate(jobs):
            way = ", autograd" if job.way == "autograd" else ""
            progress(f"{job.runtime}: {job.program}{way}: {job.artifact.name}")
            entry = entry_of(job.program)
            if entry not in partners and eager is not None and job.runtime != EAGER:
                model = Job(EAGER, eager, entry, "run", "")
                own = _Clock(model, programs, folder / f"eager-{entry}", limits)
                partners[entry] = stack.enter_context(own)
            with _Clock(job, programs, folder / str(number), limits) as clock:
                for point in of_job(job, at):
                    yield _timing(job, point, clock, partners.get(entry), rounds)


def _timing(
    job: Job, point: Point, clock: "_Clock", partner: "_Clock | None", rounds: int
) -> Timing:
    here = _named(job, point)
    # Eager gives gradients by autograd, whatever way the artifact gives them.
    ways = [(clock, job.way)]
    if partner is not None:
        ways.append((partner, "autograd" if job.program == "gradient" else "run"))
    seconds: list[list[float]] = [[], []]
    ratios: list[float] = []
    try:
        # The first calls allocate, profile and compile; the next tells how many make a turn.
        calls = []
        for who, way in ways:
            who.calls(job.program, way, point, 3)
            once = min(who.calls(job.program, way, point, 3))
            calls.append(max(1, min(_MOST_CALLS, round(_TURN_SECONDS / max(once, 1e-9)))))
        for turn in range(rounds):
            medians = {}
            order = range(len(ways)) if turn % 2 == 0 else reversed(range(len(ways)))
            for i in order:
                time.sleep(_PAUSE_SECONDS)
                taken = ways[i][0].calls(job.program, ways[i][1], point, calls[i])
                seconds[i] += taken
                medians[i] = statistics.median(taken)
            ratios.append(medians[0] / medians.get(1, medians[0]))
    except _Stopped as stopped:
        return Timing(*here, reason=str(stopped), error=stopped.error)
    eager_itself = job.runtime == EAGER
    return Timing(
        *here,
        seconds=statistics.median(seconds[0]),
        fastest=min(seconds[0]),
        ratio=statistics.median(ratios) if partner is not None or eager_itself else None,
        peak_bytes=clock.peak,
        calls=len(seconds[0]),
    )


def of_job(job: Job, at: Sequence[Point]) -> list[Point]:
    """The points whose inputs the job's program takes."""
    return [point for point in at if point.entry == entry_of(job.program)]


def without(job: Job, point: Point, reason: str) -> Timing:
    """What there is to say of a runtime that cannot run here."""
    return Timing(*_named(job, point), reason=reason)


def _named(job: Job, point: Point) -> tuple[str, str, str, str, Mapping[str, int]]:
    name = "model" if job.runtime == EAGER else job.artifact.name
    return job.runtime, name, job.program, job.way, point.sizes


class _Stopped(Exception):
    def __init__(self, reason: str, *, error: bool) -> None:
        super().__init__(reason)
        self.error = error


class _Clock:
    """A process that has an artifact loaded, and times its calls."""

    def __init__(
        self, job: Job, programs: Mapping[str, Mapping[str, Any]], folder: Path, limits: Limits
    ) -> None:
        folder.mkdir()
        entry = programs[entry_of(job.program)]
        request: dict[str, Any] = {
            "folder": str(folder),
            "runtime": job.runtime,
            "artifact": str(job.artifact),
            "program": programs[job.program] if job.way == "run" else entry,
            "inputs": [spec["name"] for spec in entry["inputs"]],
            "cotangents": _cotangent_names(entry) if entry["kind"] == "forward" else [],
        }
        file = folder / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        self.peak: int | None = None
        self._folder = folder
        self._asked = 0
        self._loaded = False
        self._stopped: _Stopped | None = None
        arguments = ["fuseport.exporter.runtimes._stopwatch", str(file)]
        bounds = runtimes.confine(job.runtime, [request["program"]], folder)
        # Its memory is measured: it has what it needs, and no more.
        self._child = Child(arguments, folder / "stderr", limits, bounds, forked=False)

    def __enter__(self) -> "_Clock":
        self._child.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._child.__exit__(*exception)

    def calls(self, kind: str, way: str, point: Point, count: int) -> list[float]:
        """Seconds of each of so many calls; `_Stopped` if there are none to be had."""
        if self._stopped is not None:
            raise self._stopped
        if not self._loaded:
            self._answer()
            self._loaded = True
        self._asked += 1
        job = {"kind": kind, "way": way, "tensors": str(point.file), "calls": count}
        self._child.tell(json.dumps(job) + "\n")
        answer = self._answer()
        self.peak = answer["peak"]
        return [float(seconds) for seconds in answer["seconds"]]

    def _answer(self) -> Mapping[str, Any]:
        file = self._folder / f"{self._asked}.json"
        self._child.expect(True)
        pause = pauses()
        while not file.exists():
            if self._child.ended() and not file.exists():
                self._stopped = _Stopped(self._child.last_words(), error=True)
                raise self._stopped
            next(pause)
        self._child.expect(False)
        answer: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if answer["status"] != "done":
            stopped = _Stopped(answer["reason"], error=answer["status"] == "error")
            if not self._loaded:
                self._stopped = stopped
            raise stopped
        return answer
