"""`export` and `verify`: the way of the data, in one screen each."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from fuseport.exporter import bench as timing
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter import formats, libraries, models, runtimes, trust
from fuseport.exporter.bench import Bench, Timing
from fuseport.exporter.bundle import (
    WEIGHTS,
    Bundle,
    check_target,
    hash_file,
    open_bundle,
    staged,
)
from fuseport.exporter.describe import describe, environment
from fuseport.exporter.errors import Missing, UnsafeInput, UsageError
from fuseport.exporter.forward import capture_forward
from fuseport.exporter.gradient import capture_gradient
from fuseport.exporter.models.model import Model, example
from fuseport.exporter.program import (
    Kind,
    Program,
    TensorSpec,
    count_nodes,
)
from fuseport.exporter.verify import plan, truth
from fuseport.exporter.verify.compare import Judgement, Tolerance
from fuseport.exporter.verify.report import Report, Row
from fuseport.exporter.verify.run import Limits
from fuseport.exporter.verify.subject import prepare, programs_of, whole

__all__ = ["PROGRAMS", "bench", "capture", "export", "verify"]

PROGRAMS: tuple[Kind, ...] = ("forward", "gradient")

# Truth of larger tensors is not stored in a bundle: `verify` computes it again from the model.
_SAMPLE_LIMIT = 4 * 2**20

Progress = Callable[[str], None]


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    model: str | None = None,
    inputs: Sequence[TensorSpec] | None = None,
    programs: Sequence[Kind] = PROGRAMS,
    format: Sequence[str] | None = None,
    opset: int = formats.DEFAULT_OPSET,
    dtype: str | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Export a checkpoint's model to formats, into a bundle.

    Args:
        checkpoint: a file or folder; its layout and architecture are recognised.
        output: the bundle's folder.
        model: `module:callable` or `file.py:callable` of the user's own, instead of recognition.
        inputs: of the user's own model; see `models.user.parse_inputs`.
        programs: `forward`, `gradient`, or both.
        format: names of formats, see `formats.FORMATS`; None for all but `aot_inductor`, which
            takes minutes to compile a large model, and runs only on machines like this one.
        opset: of ONNX's standard operators.
        dtype: to convert the weights to, `bfloat16` for example; None leaves them.
        seed: of example inputs and samples.
        force: replace a bundle that is there.
        progress: told of each step.

    Returns:
        The bundle, read back from disk.

    Raises:
        FuseportError: one of `fuseport.exporter.errors`, by its kind; the output is as it was then.
    """
    target = Path(output)
    check_target(target, force=force)
    if opset not in formats.OPSETS:
        raise UsageError(
            f"opset {opset}: choose one of {formats.OPSETS[0]} to {formats.OPSETS[-1]}"
        )
    wanted = formats.default() if format is None else format
    writers = {name: formats.get(name) for name in wanted}
    progress("reading the checkpoint")
    loaded = checkpoints.load(Path(checkpoint))
    built, notes = models.from_checkpoint(loaded, code=model, inputs=inputs)
    if dtype is not None:
        notes += _convert(built, dtype)
    captured = list(capture(built, programs, seed, progress))
    cases, dropped = plan.admitted(plan.cases(built.sizes, seed), captured[0].admits)
    with staged(target, force=force) as (folder, manifest):
        weights = folder / WEIGHTS
        save_file(_state(built), weights)
        manifest |= describe(loaded, built, captured, (*notes, *dropped), seed)
        manifest["libraries"], without = libraries.pack(manifest, folder)
        manifest["notes"] += without
        options = formats.Options(weights, opset)
        for program in captured:
            for name, writer in writers.items():
                if program.kind in programs:
                    progress(f"writing {program.kind}{writer.SUFFIX}")
                    file = f"{program.kind}{writer.SUFFIX}"
                    facts = writer.write(program, folder / file, options)
                    manifest["artifacts"].append(
                        {"file": file, "program": program.kind, "format": name, **facts}
                    )
        captured.clear()
        (folder / "samples").mkdir()
        truth.compute(built, cases, folder / "samples", limit=_SAMPLE_LIMIT, progress=progress)
    bundle = open_bundle(target)
    with suppress(OSError):  # without a cache folder to write to, `verify` asks
        trust.add(bundle.sha256)
    return bundle


def verify(
    bundle: str | Path,
    *,
    runtime: Sequence[str] | None = None,
    artifact: str | Path | None = None,
    program: Kind | None = None,
    model: str | None = None,
    tolerance: Tolerance | None = None,
    limits: Limits | None = None,
    trust_native: Sequence[str] = (),
    progress: Progress = lambda _: None,
) -> Report:
    """Compare every artifact of a bundle with the model: outputs and gradients, in every runtime.

    Args:
        bundle: its folder.
        runtime: names of runtimes, see `runtimes.RUNTIMES`; None for all that are here.
        artifact: a file made or changed elsewhere, to be compared instead of the bundle's own.
        program: that the artifact holds; None to tell from the file.
        model: the user's own code, where the bundle came from it; without it, the samples of the
            export are compared.
        tolerance: the user's, instead of the rule of the baseline.
        limits: of each runtime's process; None for the default.
        trust_native: SHA-256 of manifests and artifacts whose machine code may be loaded, from now
            on, beside those that this user exported.
        progress: told of each step.

    Raises:
        UsageError: a name is unknown, or there is no such bundle or file.
        UnsafeInput: a runtime that was named would load machine code that is not trusted.
        CorruptInput: the bundle is not as it was written.
        Missing: a runtime that was named is not installed.
    """
    begin = time.monotonic()
    opened = open_bundle(Path(bundle))
    for sha256 in trust_native:
        trust.add(sha256)
    chosen = _chosen(runtime)
    rows: list[Row] = []
    with _work_folder() as work:
        subject = prepare(opened, model, work, progress)
        rows += subject.rows
        file = None if artifact is None else Path(artifact)
        named = runtime is not None
        jobs = {name: list(subject.jobs(name, file, program, named=named)) for name in chosen}
        for name in (name for name in chosen if jobs[name]):
            reason = _unavailable(name, opened, file, named=named)
            if reason is not None:
                rows.append(whole(name, Judgement("unsupported", reason)))
                continue
            folder = work / name
            folder.mkdir()
            rows += subject.run(jobs[name], folder, limits or Limits(), tolerance, progress)
            shutil.rmtree(folder)
    seconds = time.monotonic() - begin
    return Report(str(bundle), opened.sha256, environment(), seconds, tuple(rows), subject.notes)


def bench(
    bundle: str | Path,
    *,
    runtime: Sequence[str] | None = None,
    program: Kind | None = None,
    sizes: Sequence[Mapping[str, int]] = (),
    model: str | None = None,
    rounds: int = 10,
    limits: Limits | None = None,
    progress: Progress = lambda _: None,
) -> Bench:
    """Time every artifact of a bundle in every runtime, in turns with the model in eager.

    Args:
        bundle: its folder.
        runtime: names of runtimes; None for all that are here.
        program: `forward` or `gradient`; None for both.
        sizes: of dynamic dimensions, the others are as at the export; none for the bundle's cases.
        model: the user's own code, where the bundle came from it; without it there are no ratios.
        rounds: turns that each runtime and eager take.
        limits: of each runtime's process; None for the default.
        progress: told of each step.

    Raises:
        UsageError: a name is unknown, or there is no such bundle or dimension.
        UnsafeInput: a runtime that was named would load machine code that is not trusted.
        CorruptInput: the bundle is not as it was written.
        Missing: a runtime that was named is not installed.
    """
    opened = open_bundle(Path(bundle))
    chosen = _chosen(runtime)
    manifest = opened.manifest
    rebuilt = model is not None or manifest["architecture"]["name"] != "user"
    programs = programs_of(manifest, model)
    results: list[Timing] = []
    with _work_folder() as work:
        at = timing.points(opened, sizes, manifest["seed"], work)
        for name in chosen:
            jobs = [
                job
                for job in plan.jobs(opened.folder, manifest, [name], [""], rebuilt=rebuilt)
                if program in (None, job.program)
            ]
            if not jobs:
                if runtime is not None:
                    raise UsageError(f"{opened.folder}: nothing in it is for the runtime {name}")
                continue
            reason = _unavailable(name, opened, None, named=runtime is not None)
            if reason is not None:
                results += (timing.without(job, p, reason) for job in jobs for p in at)
                continue
            folder = work / name
            folder.mkdir()
            eager = opened.weights if rebuilt else None
            results += timing.measure(
                jobs,
                at,
                programs,
                eager,
                folder,
                rounds=rounds,
                limits=limits or Limits(),
                progress=progress,
            )
            shutil.rmtree(folder)
    return Bench(str(bundle), opened.sha256, rounds, tuple(results), environment())


def _convert(model: Model, dtype: str) -> tuple[str, ...]:
    target = getattr(torch, dtype, None)
    if not isinstance(target, torch.dtype) or not target.is_floating_point:
        raise UsageError(f"dtype {dtype}: choose float32, float64, float16 or bfloat16")
    stayed = models.convert(model, target)
    if not stayed:
        return ()
    ends = ", ".join(end.lstrip(".") for end in model.keeps_float32)
    return (f"{len(stayed)} parameters stay float32 in {dtype}: those called {ends}",)


def capture(
    model: Model,
    wanted: Sequence[Kind] = PROGRAMS,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Iterator[Program]:
    """The forward program of a model and, if wanted, the gradient program.

    Raises:
        ExportFailed: the model cannot be captured.
        Missing: the captured program has not one scan node for each scan of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {spec.name: example(spec, model.sizes, generator) for spec in model.inputs}
    progress("capturing the forward program")
    with model.fused():
        forward = capture_forward(model.module, inputs, model.inputs, model.outputs)
    found = sum(
        count_nodes(forward, f"fuseport::{name}")
        for name in ("selective_scan", "selective_scan_gated")
    )
    if model.scans is not None and found != model.scans:
        raise Missing(
            f"the captured program has {found} scan nodes where the model has {model.scans} scans: "
            "the fused op did not take their place; report this with the version of the package"
        )
    yield forward
    if "gradient" in wanted:
        progress("capturing the gradient program")
        yield capture_gradient(forward)


def _state(model: Model) -> dict[str, torch.Tensor]:
    """What the module's state dict holds, tied tensors once."""
    kept: dict[int, str] = {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        kept.setdefault(id(tensor), name)
    state = model.module.state_dict()
    return {name: state[name].contiguous() for name in kept.values()}


def _chosen(names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return runtimes.RUNTIMES
    for name in names:
        reason = runtimes.get(name).missing()
        if reason is not None:
            raise Missing(f"{name}: {reason}")
    return tuple(dict.fromkeys(names))


def _unavailable(runtime: str, bundle: Bundle, artifact: Path | None, *, named: bool) -> str | None:
    """Why a runtime must not or cannot run what there is; None if it can.

    Raises:
        UnsafeInput: the user named it, and it would load machine code that is not trusted.
    """
    if getattr(runtimes.get(runtime), "NATIVE", False):
        what = artifact or bundle.folder
        sha256 = hash_file(artifact) if artifact else bundle.sha256
        if not trust.is_trusted(sha256):
            reason = (
                f"{what} has machine code that this user has not exported; if you trust where it "
                f"comes from: --trust-native {sha256}"
            )
            if named:
                raise UnsafeInput(f"{runtime}: {reason}")
            return reason
    return runtimes.get(runtime).missing()


@contextmanager
def _work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuseport-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
