"""What is verified: a bundle, its truth, and the jobs and rows that come of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter import models, runtimes
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.exporter.verify import plan, truth
from fuseport.exporter.verify.compare import Judgement, Tolerance, judge
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.run import Answer, Limits, execute
from fuseport.exporter.verify.truth import Errors, Sample

__all__ = ["Subject", "prepare", "whole"]

# Truth computed on another machine agrees to rounding in float64, amplified by the model's depth.
_STORED_RTOL = 1e-8


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

    def jobs(self, runtime: str, artifact: Path | None, program: str | None) -> Iterator[Job]:
        """What a runtime has to do: the bundle's artifacts, or `artifact` alone.

        Raises:
            UsageError: there is no such file, or no format has its suffix.
        """
        names = list(self.samples)
        folder, manifest = self.bundle.folder, self.bundle.manifest
        if artifact is None:
            yield from plan.jobs(folder, manifest, [runtime], names, rebuilt=self.rebuilt)
            return
        format_name, kind = _recognised(artifact, program, manifest)
        if format_name == runtimes.get(runtime).FORMAT:
            yield from plan.of_artifact(runtime, artifact, kind, names)

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
            progress(f"{job.runtime}: {job.artifact.name}: {job.case}")

        answers = execute(jobs, self.samples, self.programs, folder, limits, started)
        for answer in answers:
            yield from _judged(answer, self, tolerance)


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
    stored = truth.read_all(bundle.folder / "samples")
    notes: list[str] = []
    rows: list[Row] = []
    samples = stored
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
        rows += _stored_rows(stored, samples)
        del model
    for sample in samples:
        if sample.refused is not None:
            reason = f"the model itself refuses {sample.case.sizes}: {sample.refused}"
            rows.append(whole("eager", Judgement("unsupported", reason), case=sample.case.name))
    return Subject(
        bundle,
        {s.case.name: s for s in samples if s.refused is None},
        _programs(manifest, code),
        rebuilt,
        tuple(rows),
        tuple(notes),
    )


def whole(runtime: str, judgement: Judgement, *, case: str = "*") -> Row:
    """A row that speaks of a whole runtime or case."""
    return Row(runtime, None, "*", "*", "run", case, "*", judgement.verdict, judgement.reason)


def _stored_rows(stored: Sequence[Sample], computed: Sequence[Sample]) -> Iterator[Row]:
    """Hold the truth of the model built again against that of the model that was exported."""
    then = {sample.case.name: sample for sample in stored}
    for sample in computed:
        before = then.get(sample.case.name)
        if before is None or before.refused is not None or sample.refused is not None:
            continue
        for name in sample.dtypes:
            if name in before.omitted:
                continue
            exact = truth.read(before, name)
            scale = float(exact.abs().nan_to_num().max()) if exact.numel() else 0.0
            tolerance = Tolerance(atol=_STORED_RTOL * scale, rtol=_STORED_RTOL)
            dtype = str(exact.dtype).removeprefix("torch.")
            value = truth.read(sample, name)
            judgement = judge(name, value, exact, dtype, Errors(0.0, 0.0), tolerance)
            program = "gradient" if name.startswith("grad/") else "forward"
            yield Row(
                runtime="float64",
                provider=None,
                artifact="samples",
                program=program,
                way="run",
                case=sample.case.name,
                tensor=name,
                **vars(judgement),
            )


def _programs(manifest: Mapping[str, Any], code: str | None) -> dict[str, dict[str, Any]]:
    model = {"architecture": manifest["architecture"], "code": code}
    return {kind: {**program, **model} for kind, program in manifest["programs"].items()}


def _recognised(
    artifact: Path, program: str | None, manifest: Mapping[str, Any]
) -> tuple[str, str]:
    """Format and program of a file made elsewhere."""
    from fuseport.exporter import formats

    if not artifact.is_file():
        raise UsageError(f"{artifact}: there is no such file")
    suffixes = {formats.get(name).SUFFIX: name for name in formats.FORMATS}
    if artifact.suffix not in suffixes:
        raise UsageError(
            f"{artifact}: no format has the suffix {artifact.suffix or '(none)'}; "
            f"there are {', '.join(suffixes)}"
        )
    format_name = suffixes[artifact.suffix]
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


def _judged(answer: Answer, subject: Subject, tolerance: Tolerance | None) -> Iterator[Row]:
    """The rows of one job: one for each tensor, or one for all where nothing can be compared."""
    job = answer.job
    sample = subject.samples[job.case]
    provider = getattr(runtimes.get(job.runtime), "PROVIDER", None)

    def row(tensor: str, judgement: Judgement, *, crash: bool = False) -> Row:
        return Row(
            runtime=job.runtime,
            provider=provider,
            artifact="model" if runtimes.get(job.runtime).FORMAT is None else job.artifact.name,
            program=job.program,
            way=job.way,
            case=job.case,
            tensor=tensor,
            crash=crash,
            **vars(judgement),
        )

    if answer.status == "unsupported":
        yield row("*", Judgement("unsupported", answer.reason))
        return
    if answer.status in ("error", "crash"):
        yield row("*", Judgement("error", answer.reason), crash=answer.status == "crash")
        return
    expected = [spec["name"] for spec in subject.programs["forward"]["outputs"]]
    if job.program == "gradient":
        expected += [n for n in [*sample.dtypes, *sample.none] if n.startswith("grad/")]
    for call in answer.calls or {}:
        seen = set()
        for name, tensor in answer.tensors(call):
            seen.add(name)
            judgement = _judge(name, tensor, sample, tolerance)
            if call == 1:
                yield row(name, judgement)
            elif judgement.verdict == "fail":
                reason = f"at call {call}, not at the first: {judgement.reason}"
                yield row(name, Judgement(**{**vars(judgement), "reason": reason}))
        yield from (
            row(name, _judge(name, None, sample, tolerance))
            for name in expected
            if name not in seen
        )


def _judge(
    name: str, tensor: torch.Tensor | None, sample: Sample, tolerance: Tolerance | None
) -> Judgement:
    if name in sample.none:
        return judge(name, tensor, None, "", Errors(0.0, 0.0), tolerance)
    if name not in sample.dtypes:
        return Judgement("fail", "the model has nothing of this name")
    if name in sample.omitted:
        return Judgement(
            "unsupported", "its truth is too large to be stored in the bundle: give --model"
        )
    if name in sample.unstable:
        return Judgement("unsupported", "the model does not repeat it bit for bit")
    return judge(
        name,
        tensor,
        truth.read(sample, name),
        sample.dtypes[name],
        sample.baseline[name],
        tolerance,
    )
