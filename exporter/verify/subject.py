"""What is verified: a bundle and its truth, and the jobs and rows that come of them."""

import ctypes
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseport.exporter import formats, models, runtimes
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.child.spent import Spent
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.exporter.program import KINDS, Entry
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.user_code.op_choice import OwnOps, needed
from fuseport.exporter.verify import plan, truth
from fuseport.exporter.verify.compare import Judgement
from fuseport.exporter.verify.decoding import decoded
from fuseport.exporter.verify.keeping import Kept
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.rows import judged, repeated, whole
from fuseport.exporter.verify.run import Answer, Limits, execute
from fuseport.exporter.verify.sample import Sample, read_all
from fuseport.exporter.verify.second_look import SecondLook
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["Subject", "prepare", "programs_of", "whole"]


@dataclass(frozen=True)
class Subject:
    """A bundle with truth to compare with.

    Attributes:
        bundle: it.
        samples: by the case's name; those that the model can run.
        programs: by kind, what the manifest says, and what a runtime of the model itself needs.
        rows: what preparing found.
        notes: what the reader should know, a sentence each.
        again: what holds against more computations of the model; None where it cannot be run.
    """

    bundle: Bundle
    samples: Mapping[str, Sample]
    programs: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    again: SecondLook | None

    @property
    def changed(self) -> bool:
        """Whether the model, built again, computes something else than at the export."""
        return any(row.artifact == "samples" and row.verdict == "fail" for row in self.rows)

    @property
    def rebuilt(self) -> bool:
        """Whether the model itself can be run."""
        return self.again is not None

    def jobs(
        self, runtime: str, artifact: Path | None, program: str | None, *, named: bool = False
    ) -> Iterator[Job]:
        """What a runtime has to do: the bundle's artifacts, or `artifact` alone.

        Args:
            runtime: its name.
            artifact: a file made elsewhere.
            program: that it holds, None to tell from the file; of the bundle's, that to compare.
            named: whether the user asked for this runtime, so that it must have something to do.

        Raises:
            UsageError: there is no such file, no format has its suffix, or a runtime that was named
                runs nothing of what there is.
        """
        names: dict[Entry, list[str]] = {}
        for sample in self.samples.values():
            names.setdefault(sample.case.entry, []).append(sample.case.name)
        if artifact is None:
            folder, manifest = self.bundle.folder, self.bundle.manifest
            every = plan.jobs(folder, manifest, [runtime], names, rebuilt=self.rebuilt, forms=True)
            found = [job for job in every if program in (None, job.program)]
        else:
            format_name, kind = _recognised(artifact, program, self.bundle.manifest)
            runs = format_name == runtimes.get(runtime).FORMAT
            each = plan.of_artifact(runtime, artifact, kind, names, forms=True)
            found = list(each) if runs else []
        if named and names and not found:
            what = artifact or f"{self.bundle.folder}: nothing in it"
            needed = runtimes.get(runtime).FORMAT or "the model itself: give --model"
            raise UsageError(f"{what} is for the runtime {runtime}, which runs {needed}")
        yield from found

    def run(
        self,
        jobs: Sequence[Job],
        folder: Path,
        limits: Limits,
        tolerances: Tolerances | None,
        progress: Callable[[str], None],
        kept: Kept,
        spent: Spent,
    ) -> Generator[tuple[Row, ...] | None, None, None]:
        """Do the jobs of one runtime, and judge what comes of them: the rows of one after another,
        and None as often as there are none yet.

        Args:
            jobs: of the runtime.
            folder: for this call alone; it is made, and removed.
            limits: of each child.
            tolerances: the user's; None for the rule.
            progress: told of each job.
            kept: what is known of jobs already, and where to note what comes of others.
            spent: to count the time in.
        """

        def started(job: Job) -> None:
            what = "model" if runtimes.get(job.runtime).FORMAT is None else job.artifact.name
            way = "" if job.way == "run" else f", {job.way}"
            progress(f"{job.runtime}: {what}{way}: {job.case}")

        folder.mkdir()
        done = {job: rows for job in jobs if (rows := kept.record.rows(job)) is not None}
        left = [job for job in jobs if job not in done]
        answers: Generator[Answer | None, None, None]
        if kept.saved is not None:
            answers = kept.saved.answers(left, self.samples)
        else:
            answers = execute(left, self.samples, lambda _: self.programs, folder, limits, started)
        with closing(answers):  # so that an interrupt ends the child at once
            for job in jobs:
                if job in done:
                    yield done[job]
                    continue
                while (answer := next(answers)) is None:
                    yield None
                sample = self.samples[job.case]
                spent.add(answer.spent)
                with spent.on("comparing"):
                    kept.recorder.keep(answer, sample)
                    found = self.judged(answer, tolerances)
                    kept.record.add(job, found)
                yield found
        shutil.rmtree(folder)

    def judged(self, answer: Answer, tolerances: Tolerances | None = None) -> tuple[Row, ...]:
        """The rows of one job; see `rows.judged`."""
        sample = self.samples[answer.job.case]
        program = self.programs[sample.case.entry]
        rows = tuple(judged(answer, sample, program, tolerances))
        if self.again is not None:
            rows = self.again.judged(answer, sample, program, tolerances, rows)
        return rows


def prepare(
    bundle: Bundle,
    code: str | None,
    work: Path,
    progress: Callable[[str], None],
    own: OwnOps | None = None,
    seeds: Sequence[int] = (0,),
    spent: Spent | None = None,
    device: str = "cpu",
) -> Subject:
    """Build the model again and compute truth, or take the samples of the export.

    Args:
        bundle: whose files are known to be unchanged.
        code: the user's own model code, if the model came from it.
        work: a folder to write truth to.
        progress: told of each step.
        own: the user's own ops, if there are any in the bundle.
        seeds: see `plan.seeded`.
        spent: to count the time in.
        device: that runtimes compute on; truth is the CPU's in any case.

    Raises:
        Missing: other seeds are wanted, and the model cannot be built again to have their truth.
    """
    manifest = bundle.manifest
    stored = read_all(bundle.folder / "samples")
    samples = stored
    notes: list[str] = []
    rows: list[Row] = []
    again: SecondLook | None = None
    spent = spent or Spent()

    def rebuilt() -> models.Model:
        return models.rebuild(manifest["architecture"], bundle.weights, code=code)

    try:
        if note := needed(manifest, own):
            notes.append(note)
        progress("building the model again")
        with spent.on("opening"):
            model = rebuilt()
    except Missing as error:
        if tuple(seeds) != (0,):
            raise Missing(f"other seeds need the model itself: {error}") from error
        notes.append(f"compared on the samples stored at the export: {error}")
    else:
        folder = work / "truth"
        folder.mkdir()
        refused = {sample.case.name for sample in stored if sample.refused is not None}
        cases = plan.seeded([sample.case for sample in stored], seeds, refused)
        given = {sample.case.name: sample.file for sample in stored if sample.refused is None}
        samples = truth.compute(model, cases, folder, given=given, progress=progress, spent=spent)
        with spent.on("comparing"):
            rows += repeated(stored, samples)
        if any(row.verdict == "fail" for row in rows):
            notes.append(
                "in float64 the model itself gives something else than at the export: its code, or "
                "a package that it uses, is another; artifacts are held against what it is now"
            )
        with spent.on("truth"):
            rows += decoded(model, manifest["programs"], manifest["seed"], progress)
        del model
        _give_back()
        again = SecondLook(rebuilt, progress, spent)
    for sample in samples:
        if sample.refused is not None:
            judgement = Judgement("unsupported", sample.refusal)
            rows.append(whole("eager", judgement, case=sample.case.name))
    notes += (
        plan.conditional(entry, program)
        for entry, program in manifest["programs"].items()
        if "conditions" in program
    )
    notes += plan.ungraded(manifest["programs"])
    notes += own_backward.doubts(manifest["architecture"]["config"])
    return Subject(
        bundle,
        {s.case.name: s for s in samples if s.refused is None},
        programs_of(manifest, code, own, device),
        tuple(rows),
        tuple(notes),
        again,
    )


def _give_back() -> None:
    """Return freed memory to the system, for the children: the C library keeps it otherwise."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def programs_of(
    manifest: Mapping[str, Any], code: str | None, own: OwnOps | None, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """By kind, what a runtime is told of a program; see `runtimes.Runtime.load`."""
    shared = {
        "architecture": manifest["architecture"],
        "code": code,
        "ops": list(manifest["ops"]),
        "own_ops": None if own is None else own.place,
        "device": device,
    }
    return {
        kind: {"kind": kind, **program, **shared} for kind, program in manifest["programs"].items()
    }


def _recognised(
    artifact: Path, program: str | None, manifest: Mapping[str, Any]
) -> tuple[str, str]:
    """Format and program of a file made elsewhere."""
    if not artifact.is_file():
        raise UsageError(f"{artifact}: there is no such file")
    format_name = formats.of_file(artifact.name)
    if program is None:
        program = _program_of_onnx(artifact, manifest) if format_name == "onnx" else None
        program = program or next((k for k in KINDS if k in artifact.name), "forward")
    if program not in manifest["programs"]:
        raise UsageError(f"{artifact}: the bundle has no {program} program to hold it against")
    return format_name, program


def _program_of_onnx(artifact: Path, manifest: Mapping[str, Any]) -> str | None:
    """The program whose inputs the file has; None if it has other ones."""
    import onnx

    try:
        graph = onnx.load(artifact, load_external_data=False).graph
    except Exception as error:  # protobuf raises its own types, by version
        raise CorruptInput(f"{artifact}: not an ONNX file ({type(error).__name__})") from error
    found = {value.name for value in graph.input}
    for kind, program in manifest["programs"].items():
        if found == {spec["name"] for spec in program["inputs"]}:
            return str(kind)
    return None
