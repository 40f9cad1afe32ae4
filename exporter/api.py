"""`export` and `verify`: the way of the data, in one screen each."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from fuseport import ops
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter import formats, models, runtimes
from fuseport.exporter.bundle import WEIGHTS, Bundle, check_target, open_bundle, staged
from fuseport.exporter.describe import describe, environment
from fuseport.exporter.errors import Missing, UsageError
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
from fuseport.exporter.verify.subject import prepare, whole

__all__ = ["PROGRAMS", "capture", "export", "verify"]

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
    format: Sequence[str] = formats.FORMATS,
    opset: int = formats.DEFAULT_OPSET,
    dtype: str | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Export a checkpoint's model to every format, into a bundle.

    Args:
        checkpoint: a file or folder; its layout and architecture are recognised.
        output: the bundle's folder.
        model: `module:callable` or `file.py:callable` of the user's own, instead of recognition.
        inputs: of the user's own model; see `models.user.parse_inputs`.
        programs: `forward`, `gradient`, or both.
        format: names of formats, see `formats.FORMATS`.
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
    writers = {name: formats.get(name) for name in format}
    progress("reading the checkpoint")
    loaded = checkpoints.load(Path(checkpoint))
    built, notes = models.from_checkpoint(loaded, code=model, inputs=inputs)
    if dtype is not None:
        notes += _convert(built, dtype)
    progress("compiling or loading the ops")
    ops.register()
    captured = list(capture(built, programs, seed, progress))
    cases, dropped = plan.admitted(plan.cases(built.sizes, seed), captured[0].admits)
    with staged(target, force=force) as (folder, manifest):
        weights = folder / WEIGHTS
        save_file(_state(built), weights)
        manifest |= describe(loaded, built, captured, (*notes, *dropped), seed)
        options = formats.Options(weights, opset)
        for program in captured:
            for name, writer in writers.items():
                if program.kind in programs:
                    progress(f"writing {program.kind}{writer.SUFFIX}")
                    file = f"{program.kind}{writer.SUFFIX}"
                    writer.write(program, folder / file, options)
                    entry = {"file": file, "program": program.kind, "format": name}
                    manifest["artifacts"].append(
                        {**entry, "opset": opset} if name == "onnx" else entry
                    )
        captured.clear()
        (folder / "samples").mkdir()
        truth.compute(built, cases, folder / "samples", limit=_SAMPLE_LIMIT, progress=progress)
    return open_bundle(target)


def verify(
    bundle: str | Path,
    *,
    runtime: Sequence[str] | None = None,
    artifact: str | Path | None = None,
    program: Kind | None = None,
    model: str | None = None,
    tolerance: Tolerance | None = None,
    limits: Limits | None = None,
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
        progress: told of each step.

    Raises:
        UsageError: a name is unknown, or there is no such bundle or file.
        CorruptInput: the bundle is not as it was written.
        Missing: a runtime that was named is not installed.
    """
    begin = time.monotonic()
    opened = open_bundle(Path(bundle))
    chosen = _chosen(runtime)
    rows: list[Row] = []
    with _work_folder() as work:
        subject = prepare(opened, model, work, progress)
        rows += subject.rows
        file = None if artifact is None else Path(artifact)
        named = runtime is not None
        jobs = {name: list(subject.jobs(name, file, program, named=named)) for name in chosen}
        for name in chosen:
            reason = runtimes.get(name).missing()
            if reason is not None:
                rows.append(whole(name, Judgement("unsupported", reason)))
                continue
            folder = work / name
            folder.mkdir()
            rows += subject.run(jobs[name], folder, limits or Limits(), tolerance, progress)
            shutil.rmtree(folder)
    seconds = time.monotonic() - begin
    return Report(str(bundle), opened.sha256, environment(), seconds, tuple(rows), subject.notes)


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


@contextmanager
def _work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuseport-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
