"""The catalogue planted in a bundle: in copies of its files, and in the ops of its model.

The truth is computed once, for all of it. A wrong file is run on one case first, and on every case
only if that did not show it; so is the model with a bug in one of its ops. What gives the right
one's bits, all of them, in every case, has nothing to be seen, nor has what changes a weight or a
gradient where there is rounding alone: they are listed, and not counted.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter import runtimes
from fuseport.exporter.child import Limits
from fuseport.exporter.child.confined import Bounds
from fuseport.exporter.program import Entry, entry_of
from fuseport.exporter.verify.mutants import files
from fuseport.exporter.verify.mutants.ops import mutants
from fuseport.exporter.verify.mutants.report import Clean, Planted, Power
from fuseport.exporter.verify.mutants.unseen import unseen
from fuseport.exporter.verify.op_check.isolated import told
from fuseport.exporter.verify.plan import Job, of_artifact
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.run import Answer, execute
from fuseport.exporter.verify.subject import Subject
from fuseport.exporter.verify.turns import waited
from fuseport.ops import OPS

__all__ = ["SelfTest", "preferred"]

_MAKER = "fuseport.exporter.verify.mutants._maker"
_RUNNER = "fuseport.exporter.verify.mutants._runner"
_BESIDE = ("race of threads", "race", "gradient's race", "input changed")
"""Kinds that `ops check` looks for and a verification of a whole model does not: last bits that
vary are no mismatch there, and inputs of an op are no inputs of the model."""

Bits = Mapping[str, str]


@dataclass(frozen=True)
class _Planted(Job):
    """A job with a bug in an op, or on a wrong file."""

    op: str = ""
    kind: str = ""
    where: str = "artifact"
    changed: str = ""
    place: str = ""
    seed: int = 0
    met: str = ""


@dataclass
class SelfTest:
    """The verification of a bundle, tested.

    Attributes:
        subject: the bundle, with its truth.
        work: a folder to write to.
        limits: of each runtime's process.
        seed: of the places drawn.
        progress: told of each step.
        clean: runs of the right files so far.
        planted: bugs so far.
        notes: what the reader should know, a sentence each.
        lost: files of which wrong copies could not be made, or not all.
    """

    subject: Subject
    work: Path
    limits: Limits
    seed: int
    progress: Callable[[str], None]
    clean: list[Clean] = field(default_factory=list)
    planted: list[Planted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _met: set[str] = field(default_factory=set)

    def power(self, environment: Mapping[str, Any], seconds: float) -> Power:
        """What came of it all."""
        notes = (*self.subject.notes, *self.notes)
        found = tuple(self.planted), tuple(self.clean)
        return Power(*found, self.seed, environment, seconds, notes, tuple(self.lost))

    def run(self, runtime: str, ops: str | None, unavailable: str | None) -> None:
        """Everything of one runtime: the right files, then wrong ones of each.

        Args:
            runtime: its name; that of the model itself gets bugs in its ops.
            ops: the place of the user's own ops.
            unavailable: why it cannot run here, if it cannot.
        """
        if unavailable is not None:
            self.notes.append(f"{runtime}: {unavailable}")
            return
        right: dict[Job, Bits] = {}
        unsupported: set[str] = set()
        for job, rows, bits in self._judged(list(self.subject.jobs(runtime, None, None))):
            right[replace(job, artifact=Path(job.artifact.name))] = bits
            bad = next((r for r in rows if r.verdict in ("fail", "error")), None)
            if all(row.verdict == "unsupported" for row in rows):
                self.notes.append(f"{runtime}, {job.artifact.name}: {rows[0].reason}")
                unsupported.add(job.artifact.name)
                continue
            alarm = None if bad is None else f"{bad.tensor}: {bad.reason}"
            what = f"{runtime}, {job.artifact.name}" + _way(job)
            self.clean.append(Clean(what, job.case, "", self.seed, len(rows), alarm))
        if runtimes.get(runtime).FORMAT is None:
            self._ops(runtime, right)
        else:
            entries = self.subject.bundle.manifest["artifacts"]
            for entry in entries:
                own = entry["format"] == runtimes.get(runtime).FORMAT
                if own and entry["file"] not in unsupported:
                    self._files(runtime, ops, right, entry)

    def _files(
        self, runtime: str, ops: str | None, right: Mapping[Job, Bits], entry: Mapping[str, Any]
    ) -> None:
        """Wrong copies of one file, some at a time where they are large."""
        manifest, folder = self.subject.bundle.manifest, self.subject.bundle.folder
        program, artifact = entry["program"], folder / entry["file"]
        sources = [
            folder / e["file"]
            for e in manifest["artifacts"]
            if (e["format"], e["program"]) == ("exported_program", program)
        ]
        if entry["format"] not in files.formats():
            self.notes.append(f"{artifact.name}: machine code: no wrong copies are made of it")
            return
        if entry["format"] == "torchscript" and not sources:
            self.notes.append(f"{artifact.name}: needs the bundle's exported program: left out")
            return
        made = self.work / "made"
        made.mkdir()
        job = {
            "artifact": str(artifact),
            "source": str(sources[0]) if sources else None,
            "program": {**self.subject.programs[program]},
            "sizes": self._sizes(entry_of(program)),
            "seed": self.seed,
            "count": 1,
            "format": entry["format"],
            "folder": str(made),
            "ops": ops,
        }
        self.progress(f"{runtime}: making wrong copies of {artifact.name}")
        # The user's own code may do what the user may.
        bounds = None if ops else Bounds((self.work,))
        jobs: list[_Planted] = []

        def do() -> None:
            self._try(jobs, right, {job.artifact.name: artifact.name for job in jobs})
            for job in jobs:
                job.artifact.unlink()
            jobs.clear()

        for event in told(_MAKER, job, self.work, self.limits, bounds):
            if "lost" in event:
                self.lost.append(artifact.name)
                self.notes.append(f"{artifact.name}: wrong copies: {event['lost']}")
            elif "refused" in event:
                told_ = event["refused"]
                what = f"{told_['of']}: {told_['kind']}: {told_['place']}"
                self.notes.append(f"{what}: cannot be written: {told_['reason']}")
            else:
                jobs.append(self._job(runtime, program, made, event["made"]))
                if sum(job.artifact.stat().st_size for job in jobs) > files.AHEAD / 2:
                    do()
        do()
        shutil.rmtree(made)

    def _job(self, runtime: str, program: str, made: Path, told: Mapping[str, str]) -> _Planted:
        return _Planted(
            runtime,
            made / told["file"],
            program,
            "run",
            self._first(entry_of(program)),
            op=runtime,
            kind=told["kind"],
            changed=told["of"],
            place=told["place"],
        )

    def _ops(self, runtime: str, right: Mapping[Job, Bits]) -> None:
        used = set(self.subject.bundle.manifest["ops"])
        weights = self.subject.bundle.weights
        jobs: list[_Planted] = []
        for spec in OPS.values():
            called = {o.name for o in spec.operators if o.qualified_name in used}
            called |= {str(o.backward) for o in spec.operators if o.name in called}
            by_kind: set[str] = set()
            for mutant in mutants(spec, self.seed):
                kind = mutant.kind
                if mutant.operator not in called or kind.where not in ("forward", "gradient"):
                    continue
                if kind.name in _BESIDE or f"{kind.name} {mutant.operator}" in by_kind:
                    continue
                by_kind.add(f"{kind.name} {mutant.operator}")
                jobs.append(
                    _Planted(
                        runtime,
                        weights,
                        "gradient" if kind.where == "gradient" else "forward",
                        "autograd" if kind.where == "gradient" else "run",
                        self._first("forward"),
                        spec.name,
                        kind.name,
                        kind.where,
                        mutant.operator,
                        mutant.place,
                        self.seed,
                        str(len(jobs)),
                    )
                )
        if jobs:
            self._try(jobs, right, {weights.name: weights.name})

    def _try(
        self, jobs: Sequence[_Planted], right: Mapping[Job, Bits], names: Mapping[str, str]
    ) -> None:
        """Run them on one case each, and those that pass on all; note what became of them."""
        left: list[_Planted] = []
        for job, rows, _ in self._judged(jobs):
            if bad := _worst(rows):
                self._note(job, bad)
            else:
                left.append(job)
        cases: dict[Entry, list[str]] = {}
        for sample in self.subject.samples.values():
            cases.setdefault(sample.case.entry, []).append(sample.case.name)
        every: list[_Planted] = []
        for job in left:
            kind = "forward" if job.program == "gradient" and job.way == "autograd" else job.program
            for other in of_artifact(job.runtime, job.artifact, kind, cases):
                every.append(replace(job, program=other.program, way=other.way, case=other.case))
        by_job: dict[tuple[str, ...], list[tuple[_Planted, list[Row], Bits]]] = {}
        for job, rows, bits in self._judged(every):
            by_job.setdefault(_identity(job), []).append((job, rows, bits))
        for job in left:
            runs = by_job.get(_identity(job), [])
            shown = next((bad for _, rows, _ in runs if (bad := _worst(rows))), None)
            if shown is not None:
                self._note(job, shown)
                continue
            rows = [row for _, rows, _ in runs for row in rows]
            if all(row.verdict == "unsupported" for row in rows):
                self.notes.append(f"{job.kind}: {job.place}: {rows[0].reason}")
                continue
            changed: set[str] = set()
            for one, _, bits in runs:
                changed |= _changed(bits, right[_key(one, names[one.artifact.name])])
            same = unseen(job.kind, job.place, changed, self.subject.samples.values())
            if job.met and job.met not in self._met:
                same = "the model never calls it so that it differs from the right one"
            self._note(job, None, same, _nearest(rows))

    def _note(
        self,
        job: _Planted,
        row: Row | None,
        equivalent: str | None = None,
        nearest: str | None = None,
    ) -> None:
        by, reason = None, nearest
        if row is not None:
            what = "gradient" if row.tensor.startswith("grad/") else "output"
            by = "error" if row.verdict == "error" else what
            reason = f"{row.case}: {row.tensor}: {row.reason}"
        self.planted.append(
            Planted(job.op, job.kind, job.where, job.changed, job.place, by, reason, equivalent)
        )

    def _judged(self, jobs: Sequence[Job]) -> Iterator[tuple[Any, list[Row], Bits]]:
        """Each job with its rows and the digests of what its calls gave."""
        if not jobs:
            return
        folder = self.work / "run"
        folder.mkdir()

        def programs(job: Job) -> Mapping[str, Mapping[str, Any]]:
            if not isinstance(job, _Planted) or not job.met:
                return self.subject.programs
            label = f"{job.kind}: {job.changed}: {job.place}"
            met = str(folder / f"{job.met}.met")
            wanted = {"op": job.op, "seed": job.seed, "label": label, "met": met}
            return {k: {**p, "planted": wanted} for k, p in self.subject.programs.items()}

        def started(job: Job) -> None:
            what = f"{job.kind}, {job.place}" if isinstance(job, _Planted) else job.artifact.name
            self.progress(f"{job.runtime}: {what}{_way(job)}: {job.case}")

        samples = self.subject.samples
        run = execute(jobs, samples, programs, folder, self.limits, started, worker=_RUNNER)
        for answer in waited(run):
            bits = _digests(answer)
            yield answer.job, list(self.subject.judged(answer)), bits
        self._met |= {file.stem for file in folder.glob("*.met")}
        shutil.rmtree(folder)

    def _sizes(self, entry: Entry) -> dict[str, int]:
        """The dynamic dimensions' sizes at the export."""
        own = [s.case for s in self.subject.samples.values() if s.case.entry == entry]
        return dict(own[0].sizes)

    def _first(self, entry: Entry) -> str:
        """The case that shows most: of odd sizes, other than the export's."""
        own = [s.case for s in self.subject.samples.values() if s.case.entry == entry]
        return next((c.name for c in own if "odd" in c.name), own[0].name)


def preferred(chosen: Sequence[str], manifest: Mapping[str, Any]) -> list[str]:
    """Of the runtimes of a bundle, one for each format: others run the same wrong files."""
    order = ("eager", "onnxruntime", "onnx_reference", "torchscript", "exported_program")
    ranked = sorted(chosen, key=lambda n: order.index(n) if n in order else len(order))
    present = {entry["format"] for entry in manifest["artifacts"]}
    found: dict[str | None, str] = {}
    for name in ranked:
        form = runtimes.get(name).FORMAT
        wanted = form is None or (form in present and form in files.formats())
        if wanted and runtimes.get(name).missing() is None:
            found.setdefault(form, name)
    return list(found.values())


def _way(job: Job) -> str:
    return ", autograd" if job.way == "autograd" else ""


def _identity(job: _Planted) -> tuple[str, ...]:
    return job.op, job.kind, job.changed, job.place, str(job.artifact)


def _key(job: _Planted, name: str) -> Job:
    return Job(job.runtime, Path(name), job.program, job.way, job.case)


def _changed(found: Bits, right: Bits) -> set[str]:
    """The tensors that differ in some call, by name."""
    keys = {k for k in (*found, *right) if found.get(k) != right.get(k)}
    return {key.partition("/")[2] for key in keys}


def _worst(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.verdict in ("fail", "error")), None)


def _nearest(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.share is not None]
    if not measured:
        return "no figure was computed: " + "; ".join({str(r.reason) for r in rows if r.reason})
    row = max(measured, key=lambda r: r.share or 0.0)
    return (
        f"nearest to its bound, {row.share:.2f} of it: {row.tensor} off by "
        f"{row.max_abs_error:.2g}, the baseline's own is {row.baseline_error:.2g} ({row.case})"
    )


def _digests(answer: Answer) -> Bits:
    found: dict[str, str] = {}
    for call in answer.calls or {}:
        for name, tensor in answer.tensors(call):
            flat = tensor.contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
            head = json.dumps([list(tensor.shape), str(tensor.dtype)]).encode()
            found[f"{call}/{name}"] = hashlib.sha256(head + bytes(data)).hexdigest()
    return found
