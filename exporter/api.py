"""`export` and `verify`: the way of the data, in one screen each."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fuseport.exporter import admission, arguments, formats, models, shims
from fuseport.exporter import bench as timing
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter.arguments import Code, Examples, Inputs
from fuseport.exporter.availability import chosen_runtimes, refuse, require, unavailable
from fuseport.exporter.bench import Bench, Timing
from fuseport.exporter.bundle import (
    WEIGHTS,
    Bundle,
    check_target,
    hash_file,
    libraries,
    open_bundle,
    staged,
    trust,
)
from fuseport.exporter.bundle.staging import work_folder
from fuseport.exporter.capture import PROGRAMS, capture
from fuseport.exporter.capture.prepare import prepared
from fuseport.exporter.child.spent import Spent
from fuseport.exporter.describe import describe, environment
from fuseport.exporter.errors import (
    ExportFailed,
    StorageError,
    UsageError,
)
from fuseport.exporter.models import weights as weights_of
from fuseport.exporter.models.given import Dynamic
from fuseport.exporter.program import (
    Kind,
    entry_of,
)
from fuseport.exporter.user_code.op_choice import own_ops
from fuseport.exporter.verify import plan, truth, ways
from fuseport.exporter.verify.compare import Judgement, Tolerance
from fuseport.exporter.verify.doubts import doubts, require_some
from fuseport.exporter.verify.held import planned
from fuseport.exporter.verify.keeping import kept
from fuseport.exporter.verify.localise import Settings, diagnosed
from fuseport.exporter.verify.mutants import Power
from fuseport.exporter.verify.mutants.self_test import SelfTest, preferred
from fuseport.exporter.verify.report import Report, Row
from fuseport.exporter.verify.resume import sources
from fuseport.exporter.verify.run import Limits, quick_starts
from fuseport.exporter.verify.subject import prepare, programs_of, whole
from fuseport.exporter.verify.tolerances import Tolerances
from fuseport.exporter.verify.turns import in_turns, room

__all__ = ["PROGRAMS", "bench", "capture", "export", "self_test", "verify"]

# Truth of larger tensors is not stored in a bundle: `verify` computes it again from the model.
_SAMPLE_LIMIT = 4 * 2**20

Progress = Callable[[str], None]


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    weights: str | None = None,
    adapter: str | Path | None = None,
    model: Code | None = None,
    ops: str | None = None,
    inputs: Inputs | None = None,
    shim: str | Sequence[str] = (),
    given: Examples | None = None,
    dynamic: Dynamic | str | Sequence[str] | None = None,
    sizes: Mapping[str, int] | str | None = None,
    programs: Kind | Sequence[Kind] = PROGRAMS,
    format: str | Sequence[str] | None = None,
    opset: int = formats.DEFAULT_OPSET,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Export a checkpoint's model to formats, into a bundle.

    Args:
        checkpoint: a file or folder; its layout and architecture are recognised.
        output: the bundle's folder.
        weights: which of several in the checkpoint, `model_ema` for example; see
            `checkpoint.load`.
        adapter: a folder of a LoRA adapter that PEFT saved, for the checkpoint's model: it is
            beside the model's layers in every artifact, and alone has gradients.
        model: `module:callable` or `file.py:callable` of the user's own, instead of recognition; or
            the callable itself, if a module that can be imported has it.
        ops: a file, folder or module of the user's own that defines ops; see `op_choice`.
        inputs: of the user's own model, each as `x:[batch,3,length]` or a `TensorSpec`; see
            `models.user.parse_inputs`.
        shim: `auto`, or names of packages that the user's code imports and that stand-ins take the
            place of while it is imported and called; see `fuseport.shims`.
        given: example inputs, tensors by name or a safetensors file; they are compared on, too. Of
            the user's own model they tell the inputs, instead of `inputs`.
        dynamic: dimensions of inputs that are to be dynamic; None for those that are found to be
            so in the user's own model, and for those of a built-in architecture.
        sizes: of dynamic dimensions in the example that is captured, by name; the others are small.
        programs: `forward`, `gradient`, `step`, or several; `step` is one token of a language
            model, with its states as inputs and outputs.
        format: names of formats, see `formats.FORMATS`; None for all but `aot_inductor`, which
            takes minutes to compile a large model, and runs only on machines like this one, and
            `onnx_native`, which runs in fewer runtimes than `onnx`.
        opset: of ONNX's standard operators.
        device: that `aot_inductor` compiles for, `cpu` or `cuda`; all other files serve any.
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
    if Path(checkpoint).resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{target}: the checkpoint is in it; choose another folder")
    if opset not in formats.OPSETS:
        raise UsageError(
            f"opset {opset}: choose one of {formats.OPSETS[0]} to {formats.OPSETS[-1]}"
        )
    code, kinds = arguments.code_of(model), arguments.kinds_of(programs)
    specs, examples = arguments.specs_of(inputs), arguments.given_of(given)
    dims, wanted_sizes = arguments.dynamic_of(dynamic), arguments.sizes_of(sizes)
    wanted_dtype = arguments.dtype_of(dtype)
    if specs is not None and examples is not None:
        raise UsageError("inputs say it all: leave given out, or give tensors alone")
    wanted = formats.default() if format is None else arguments.names_of(format) or ()
    stand_ins = shims.chosen(shim)
    if stand_ins and code is None:
        raise UsageError("shims are for model code: give --model too")
    writers = {name: formats.get(name) for name in wanted}
    require(device)
    if device != "cpu" and not any(map(formats.compiled, writers)):
        raise UsageError(
            f"--device {device} is for code compiled now: add --format aot_inductor; "
            "the files of the other formats serve any device"
        )
    with own_ops(ops) as own:
        progress("reading the checkpoint")
        loaded = checkpoints.load(Path(checkpoint), weights)
        lora = None if adapter is None else checkpoints.load(Path(adapter))
        built, notes = models.from_checkpoint(
            loaded, code=code, inputs=specs, shim=stand_ins, given=examples, adapter=lora
        )
        notes = (*loaded.notes, *notes)
        built, more = prepared(built, examples, dims, wanted_sizes, wanted_dtype, seed, progress)
        notes += more
        captured = list(capture(built, kinds, seed, progress))
        notes += tuple(
            f"{program.kind}: not among the outputs, since no tensors: {', '.join(beside)}"
            for program in captured
            if (beside := program.left_out)
        )
        notes += tuple(dict.fromkeys(said for program in captured for said in program.decided))
        captured, cases, conditions, dropped = planned(built, captured, seed, progress)
        with staged(target, force=force) as (folder, manifest):
            save_file(weights_of.once(built.module), folder / WEIGHTS)
            manifest |= describe(loaded, built, captured, (*notes, *dropped), seed, lora)
            manifest["notes"] += plan.ungraded(manifest["programs"])
            for entry, found in conditions.items():
                manifest["programs"][entry] |= found
            if own is not None and (noted := own.noted(manifest["ops"])):
                manifest["own_ops"] = noted
            manifest["libraries"], without = libraries.pack(manifest, folder)
            manifest["notes"] += without
            options = formats.Options(folder / WEIGHTS, opset, device)
            for program in captured:
                for name, writer in writers.items():
                    if program.kind in kinds:
                        progress(f"writing {program.kind}{writer.SUFFIX}")
                        file = f"{program.kind}{writer.SUFFIX}"
                        with _other_formats(name, writers):
                            facts = writer.write(program, folder / file, options)
                        manifest["artifacts"].append(
                            {"file": file, "program": program.kind, "format": name, **facts}
                        )
            manifest["artifacts"], left_out = _needed(manifest["artifacts"], folder)
            manifest["notes"] += left_out + plan.without_products(manifest)
            captured.clear()
            (folder / "samples").mkdir()
            samples = truth.compute(
                built, cases, folder / "samples", limit=_SAMPLE_LIMIT, progress=progress
            )
            require_some(samples)
            manifest["notes"] += doubts(samples, cases)
            manifest["notes"] += ways.untaken(built, samples, manifest["programs"])
    bundle = open_bundle(target)
    with suppress(StorageError):  # without a cache folder to write to, `verify` asks
        trust.add(bundle.sha256)
    return bundle


def verify(
    bundle: str | Path,
    *,
    runtime: str | Sequence[str] | None = None,
    artifact: str | Path | None = None,
    program: Kind | None = None,
    model: Code | None = None,
    ops: str | None = None,
    tolerance: Tolerance | Tolerances | float | None = None,
    seeds: int | Sequence[int] = (0,),
    limits: Limits | None = None,
    jobs: int | None = None,
    device: str = "cpu",
    trust_native: Sequence[str] = (),
    resume: bool = False,
    save_outputs: str | Path | None = None,
    load_outputs: str | Path | None = None,
    localise: bool = True,
    repro: Path | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Compare every artifact of a bundle with the model: outputs and gradients, in every runtime.

    Args:
        bundle: its folder.
        runtime: names of runtimes, see `runtimes.RUNTIMES`; None for all that are here.
        artifact: a file made or changed elsewhere, to be compared instead of the bundle's own.
        program: that the artifact holds, None to tell from the file; without an artifact, which of
            `forward`, `gradient` and `step` is compared alone.
        model: the user's own code, where the bundle came from it; without it, the samples of the
            export are compared.
        ops: the user's own ops, where the bundle has some; without them, what needs them is
            unsupported.
        tolerance: the user's, for all tensors or by their names, instead of the rule of the
            baseline; a number is an absolute one for all.
        seeds: of the values of each case: 0 for those of the export, others for further ones; a
            number stands for so many, from 0.
        limits: of each runtime's process; None for the default.
        jobs: how many runtimes run at once; None for as many as there is room for, up to four, but
            one on a GPU, and where the model is not run here, so that nobody knows what it takes.
        device: `cpu`, or `cuda` for the runtimes that run on a GPU. What they give is compared with
            float64 on the CPU in either case. Of loaded outputs it is theirs.
        trust_native: SHA-256 of manifests and artifacts whose machine code may be loaded, from now
            on, beside those that this user exported.
        resume: do only what the same verification had not done when it was ended.
        save_outputs: a new folder for what runtimes give.
        load_outputs: such a folder, made here or elsewhere, to be judged instead of running them.
        localise: whether failures are looked into: where they begin, and who is at fault.
        repro: a folder for scripts that show what failed without fuseport, one folder for each.
        progress: told of each step.

    Raises:
        UsageError: a name is unknown, there is no such bundle or file, or options exclude others.
        UnsafeInput: a runtime that was named would load machine code that is not trusted.
        CorruptInput: the bundle is not as it was written, or outputs are not of it.
        Missing: a runtime that was named is not installed, or there is no such device; or other
            seeds are wanted and the model cannot be built again.
    """
    begin, spent, limits = time.monotonic(), Spent(), limits or Limits()
    model, runtime = arguments.code_of(model), arguments.names_of(runtime)
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs: {jobs}: one runtime at least runs at once")
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    if program is not None:
        arguments.kinds_of(program)
    with spent.on("opening"):
        opened = open_bundle(Path(bundle))
    tolerances = arguments.tolerances_of(tolerance)
    if tolerances is not None:
        tolerances.check(opened.tensors)
    for sha256 in trust_native:
        trust.add(sha256)
    loads = load_outputs is not None
    fused = opened.manifest["ops"] if artifact is None else None
    chosen = () if loads else chosen_runtimes(runtime, device, fused)
    if runtime is not None and artifact is None:
        refuse(chosen, opened)
    file = None if artifact is None else Path(artifact)
    options = {
        "runtime": chosen,
        "artifact": None if file is None else [str(file), file.is_file() and hash_file(file)],
        "program": program,
        "code": [model, sources(model), ops, sources(ops)],
        "device": device,
        "judged": [tolerances, limits],
    }
    rows: list[Row] = []
    if not loads and (file is None or file.is_file()):
        admission.admit(opened, file)
    keeping = kept(opened, options, seeds, resume=resume, save=save_outputs, load_from=load_outputs)
    forked = quick_starts(wanted=not loads and device == "cpu")
    with forked, own_ops(ops) as own, work_folder() as work, keeping as keep:
        subject = prepare(opened, model, work, progress, own, keep.seeds, spent, keep.device)
        rows += subject.rows
        named = runtime is not None
        if keep.saved is not None:
            found = keep.saved.jobs(opened, runtime)
        else:
            found = {name: list(subject.jobs(name, file, program, named=named)) for name in chosen}
        busy = [name for name in found if found[name]]
        if program is not None and file is None and subject.samples and not busy:
            raise UsageError(f"{opened.folder}: nothing in it is to compare of program {program}")
        # Of all of them, before the first one runs: what is refused is refused at once.
        reasons = {n: None if loads else unavailable(n, opened, file, named=named) for n in busy}
        runs = {
            name: partial(
                subject.run, found[name], work / name, limits, tolerances, progress, keep, spent
            )
            for name in busy
            if reasons[name] is None
        }
        if jobs is None:
            jobs = room() if subject.rebuilt and device == "cpu" else 1
        keep.recorder.expect(runs)
        given = in_turns(runs, jobs)
        for name, reason in reasons.items():
            if reason is not None:
                rows.append(whole(name, Judgement("unsupported", reason)))
            rows += chain.from_iterable(given.get(name, ()))
        settings = Settings(model, ops, limits, repro, localise and not loads)
        with spent.on("localising"):
            causes, more = diagnosed(rows, found, subject, work, settings, progress)
    looked = () if subject.again is None else subject.again.notes()
    notes = (*subject.notes, *looked, *([keep.saved.note] if keep.saved else []), *more)
    seconds = time.monotonic() - begin
    where = str(bundle), opened.sha256, environment(keep.device)
    return Report(*where, seconds, tuple(rows), notes, causes, dict(spent.seconds))


def self_test(
    bundle: str | Path,
    *,
    runtime: str | Sequence[str] | None = None,
    model: Code | None = None,
    ops: str | None = None,
    seed: int = 0,
    limits: Limits | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> Power:
    """Plant bugs in copies of a bundle's files and in its ops: does `verify` see them?

    Arguments and errors are those of `verify`, but that `runtime` None stands for the model itself
    and one runtime for each format, and `seed` is that of the places where bugs are planted.
    """
    begin = time.monotonic()
    model, runtime = arguments.code_of(model), arguments.names_of(runtime)
    opened = open_bundle(Path(bundle))
    chosen = chosen_runtimes(runtime, device, opened.manifest["ops"])
    if runtime is not None:
        refuse(chosen, opened)
    admission.admit(opened, None)
    with quick_starts(wanted=device == "cpu"), own_ops(ops) as own, work_folder() as work:
        subject = prepare(opened, model, work, progress, own, device=device)
        test = SelfTest(subject, work, limits or Limits(), seed, progress)
        for name in chosen if runtime else preferred(chosen, opened.manifest):
            test.run(name, ops, unavailable(name, opened, None, named=runtime is not None))
    return test.power(environment(device), time.monotonic() - begin)


def bench(
    bundle: str | Path,
    *,
    runtime: str | Sequence[str] | None = None,
    program: Kind | None = None,
    sizes: Sequence[Mapping[str, int]] = (),
    model: Code | None = None,
    ops: str | None = None,
    rounds: int = 10,
    limits: Limits | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> Bench:
    """Time every artifact of a bundle in every runtime, in turns with the model in eager.

    Args:
        bundle: its folder.
        runtime: names of runtimes; None for all that are here.
        program: `forward`, `gradient` or `step`; None for all.
        sizes: of dynamic dimensions, the others are as at the export; none for the bundle's cases.
        model: the user's own code, where the bundle came from it; without it there are no ratios.
        ops: the user's own ops, where the bundle has some.
        rounds: turns that each runtime and eager take.
        limits: of each runtime's process; None for the default.
        device: `cpu`, or `cuda` for the runtimes that run on a GPU, eager among them.
        progress: told of each step.

    Raises:
        UsageError: a name is unknown, or there is no such bundle or dimension.
        UnsafeInput: a runtime that was named would load machine code that is not trusted.
        CorruptInput: the bundle is not as it was written.
        Missing: a runtime that was named is not installed, or there is no such device.
    """
    model, runtime = arguments.code_of(model), arguments.names_of(runtime)
    opened = open_bundle(Path(bundle))
    chosen = chosen_runtimes(runtime, device, opened.manifest["ops"])
    if runtime is not None:
        refuse(chosen, opened)
    admission.admit(opened, None)
    manifest = opened.manifest
    results: list[Timing] = []
    with own_ops(ops) as own, work_folder() as work:
        rebuilt = model is not None or manifest["architecture"]["name"] != "user"
        rebuilt = rebuilt and (own is not None or "own_ops" not in manifest)
        programs = programs_of(manifest, model, own, device)
        any_case = {entry_of(kind): [""] for kind in programs}
        points = timing.points(opened, sizes, manifest["seed"], work)
        for name in chosen:
            jobs = [
                job
                for job in plan.jobs(opened.folder, manifest, [name], any_case, rebuilt=rebuilt)
                if program in (None, job.program)
            ]
            if not jobs:
                if runtime is not None:
                    raise UsageError(f"{opened.folder}: nothing in it is for the runtime {name}")
                continue
            reason = unavailable(name, opened, None, named=runtime is not None)
            if reason is not None:
                results += (
                    timing.without(job, p, reason)
                    for job in jobs
                    for p in timing.of_job(job, points)
                )
                continue
            folder = work / name
            folder.mkdir()
            eager = opened.weights if rebuilt else None
            results += timing.measure(
                jobs,
                points,
                programs,
                eager,
                folder,
                rounds=rounds,
                limits=limits or Limits(),
                progress=progress,
            )
            shutil.rmtree(folder)
    return Bench(str(bundle), opened.sha256, rounds, tuple(results), environment(device))


@contextmanager
def _other_formats(name: str, wanted: Iterable[str]) -> Iterator[None]:
    """Say, where a format cannot be written, how to have the others."""
    try:
        yield
    except ExportFailed as error:
        others = ",".join(other for other in wanted if other != name)
        if not others:
            raise
        raise ExportFailed(f"{error}; without it: --format {others}") from error


def _needed(
    artifacts: Sequence[dict[str, Any]], folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """The artifacts that are more than another in the folder, and a sentence on the others.

    Those are removed.
    """
    needed: list[dict[str, Any]] = []
    others: dict[str, list[str]] = {}
    for entry in artifacts:
        file = folder / entry["file"]
        reason = formats.redundant(entry["format"], file, entry)
        if reason is None:
            needed.append(entry)
        else:
            file.unlink()
            others.setdefault(reason, []).append(file.name)
    return needed, [f"no {' and '.join(files)}: {reason}" for reason, files in others.items()]
