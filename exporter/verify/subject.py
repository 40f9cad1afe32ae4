"""What is verified: a bundle and its truth, and the jobs and rows that come of them."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseport.exporter import formats, models, runtimes
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.exporter.verify import plan, truth
from fuseport.exporter.verify.compare import Judgement, Tolerance
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.rows import judged, repeated, whole
from fuseport.exporter.verify.run import Limits, execute
from fuseport.exporter.verify.sample import Sample, read_all

__all__ = ["Subject", "prepare", "programs_of", "whole"]


@dataclass(frozen=True)
class Subject:
    """A bundle with truth to compare with.

    Attributes:
        bundle: it.
        samples: by the case's name; those that the model can run.
        programs: by kind, what the manifest says, and what a runtime of the model itself needs.
        rebuilt: whether the model itself can be run.
        rows: what preparing found.
        notes: what the reader should know, a sentence each.
    """

    bundle: Bundle
    samples: Mapping[str, Sample]
    programs: Mapping[str, Mapping[str, Any]]
    rebuilt: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def jobs(
        self, runtime: str, artifact: Path | None, program: str | None, *, named: bool = False
    ) -> Iterator[Job]:
        """What a runtime has to do: the bundle's artifacts, or `artifact` alone.

        Args:
            runtime: its name.
            artifact: a file made elsewhere.
            program: that it holds; None to tell from the file.
            named: whether the user asked for this runtime, so that it must have something to do.

        Raises:
            UsageError: there is no such file, no format has its suffix, or a runtime that was named
                runs nothing of what there is.
        """
        names = list(self.samples)
        if artifact is None:
            folder, manifest = self.bundle.folder, self.bundle.manifest
            found = list(plan.jobs(folder, manifest, [runtime], names, rebuilt=self.rebuilt))
        else:
            format_name, kind = _recognised(artifact, program, self.bundle.manifest)
            runs = format_name == runtimes.get(runtime).FORMAT
            found = list(plan.of_artifact(runtime, artifact, kind, names)) if runs else []
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
        tolerance: Tolerance | None,
        progress: Callable[[str], None],
    ) -> Iterator[Row]:
        """Do the jobs of one runtime, and judge what comes of them."""

        def started(job: Job) -> None:
            what = "model" if runtimes.get(job.runtime).FORMAT is None else job.artifact.name
            way = ", autograd" if job.way == "autograd" else ""
            progress(f"{job.runtime}: {what}{way}: {job.case}")

        answers = execute(jobs, self.samples, self.programs, folder, limits, started)
        with closing(answers):  # so that an interrupt ends the child at once
            for answer in answers:
                sample = self.samples[answer.job.case]
                yield from judged(answer, sample, self.programs["forward"], tolerance)


def prepare(
    bundle: Bundle, code: str | None, work: Path, progress: Callable[[str], None]
) -> Subject:
    """Build the model again and compute truth, or take the samples of the export.

    Args:
        bundle: whose files are known to be unchanged.
        code: the user's own model code, if the model came from it.
        work: a folder to write truth to.
        progress: told of each step.
    """
    manifest = bundle.manifest
    stored = read_all(bundle.folder / "samples")
    samples = stored
    notes: list[str] = []
    rows: list[Row] = []
    rebuilt = True
    try:
        progress("building the model again")
        model = models.rebuild(manifest["architecture"], bundle.weights, code=code)
    except Missing as error:
        rebuilt = False
        notes.append(f"compared on the samples stored at the export: {error}")
    else:
        folder = work / "truth"
        folder.mkdir()
        cases = [sample.case for sample in stored]
        given = {sample.case.name: sample.file for sample in stored if sample.refused is None}
        samples = truth.compute(model, cases, folder, given=given, progress=progress)
        rows += repeated(stored, samples)
        del model
        _give_back()
    for sample in samples:
        if sample.refused is not None:
            reason = f"the model itself refuses {sample.case.sizes}: {sample.refused}"
            rows.append(whole("eager", Judgement("unsupported", reason), case=sample.case.name))
    return Subject(
        bundle,
        {s.case.name: s for s in samples if s.refused is None},
        programs_of(manifest, code),
        rebuilt,
        tuple(rows),
        tuple(notes),
    )


def _give_back() -> None:
    """Return freed memory to the system, for the children: the C library keeps it otherwise."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def programs_of(manifest: Mapping[str, Any], code: str | None) -> dict[str, dict[str, Any]]:
    """By kind, what a runtime is told of a program; see `runtimes.Runtime.load`."""
    shared = {
        "architecture": manifest["architecture"],
        "code": code,
        "ops": list(manifest["ops"]),
    }
    return {kind: {**program, **shared} for kind, program in manifest["programs"].items()}


def _recognised(
    artifact: Path, program: str | None, manifest: Mapping[str, Any]
) -> tuple[str, str]:
    """Format and program of a file made elsewhere."""
    if not artifact.is_file():
        raise UsageError(f"{artifact}: there is no such file")
    format_name = formats.of_file(artifact.name)
    if program is None:
        program = _program_of_onnx(artifact) if format_name == "onnx" else None
        program = program or ("gradient" if "gradient" in artifact.name else "forward")
    if program not in manifest["programs"]:
        raise UsageError(f"{artifact}: the bundle has no {program} program to hold it against")
    return format_name, program


def _program_of_onnx(artifact: Path) -> str:
    import onnx

    try:
        graph = onnx.load(artifact, load_external_data=False).graph
    except Exception as error:  # protobuf raises its own types, by version
        raise CorruptInput(f"{artifact}: not an ONNX file ({type(error).__name__})") from error
    cotangents = any(value.name.startswith("cotangent_") for value in graph.input)
    return "gradient" if cotangents else "forward"
