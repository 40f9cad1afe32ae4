"""Who is at fault: the kernel, the export or the runtime, by holding three against each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuseport.exporter import runtimes
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.program import one_line
from fuseport.exporter.verify.diagnosis import Cause
from fuseport.exporter.verify.localise.look import Alone
from fuseport.exporter.verify.localise.scene import Failure, Scene
from fuseport.exporter.verify.localise.trial import UnknownError
from fuseport.exporter.verify.plan import Job
from fuseport.ops import OPS

__all__ = ["Fault", "attributed", "is_custom", "is_onnx"]


@dataclass(frozen=True)
class Fault:
    """Who is at fault, and a sentence on how that is known; `cause` is None where it is not."""

    cause: Cause | None
    reason: str


@dataclass(frozen=True)
class _Peer:
    """Another way to run the same artifact."""

    runtime: str
    optimised: bool

    def __str__(self) -> str:
        return self.runtime if self.optimised else f"{self.runtime} without its optimisations"


def attributed(
    failure: Failure, scene: Scene, op: str | None, alone: Alone | None, eager: Alone | None
) -> Fault:
    """Who is at fault.

    Args:
        failure: of a job.
        scene: of it.
        op: that the fault begins at, if it is known.
        alone: what the suspects give by themselves in the runtime that failed.
        eager: what those of the model's own graph give by themselves in torch.
    """
    job = failure.job
    runtime = runtimes.get(job.runtime)
    what = op or "the op"
    if eager is not None and eager.judgement.verdict == "fail" and not is_onnx(job):
        return Fault(
            "kernel",
            f"{what} alone, by its registered kernel on reference inputs, is wrong: "
            f"{eager.judgement.reason}",
        )
    if runtime.FORMAT is None:
        if alone is not None and alone.wrong:
            return Fault("kernel", f"{what} is right alone, and wrong after what ran before it")
        return Fault(None, "the model's own ops are right alone")
    right, wrong, silent = _peers(failure, scene)
    if "+" in job.runtime and op is not None and is_custom(op) and (bodies := _bodies(right)):
        return Fault(
            "kernel", f"{failure.artifact} is right in {bodies}, which runs the body of {what}"
        )
    if right:
        return Fault(
            "runtime", f"the same {failure.artifact} is right in {_and(right)}{_also(wrong)}"
        )
    in_model = None if is_onnx(job) else _model_wrong(failure, scene)
    if in_model:
        return Fault("kernel", "the model itself, by the same kernels, is wrong in eager too")
    if in_model is False and runtime.FORMAT == "exported_program":
        return Fault("export", "the model itself, by the same kernels, is right in eager")
    if wrong:
        return Fault("export", f"{failure.artifact} is wrong in {_and([job.runtime, *wrong])}")
    right_in_model = eager is not None and eager.judgement.verdict == "pass"
    if right_in_model and alone is not None and alone.wrong:
        return Fault("export", f"{what} of the model is right alone, that of the artifact not")
    why = "; ".join(silent) or f"nothing else here runs {failure.artifact}"
    return Fault(None, why)


def is_custom(op: str) -> bool:
    """Whether it is an operator of an op of fuseport's or the user's own."""
    return any(op == o.qualified_name for spec in OPS.values() for o in spec.operators)


def _peers(failure: Failure, scene: Scene) -> tuple[list[str], list[str], list[str]]:
    """Other ways to run the artifact: those that are right, those that are wrong; and why others
    are neither."""
    job = failure.job
    mine = runtimes.get(job.runtime)
    peers = [_Peer(job.runtime, False)] if getattr(mine, "OPTIMISES", False) else []
    for name in runtimes.RUNTIMES:
        other = runtimes.get(name)
        # A runtime with kernels more says nothing of one without them.
        if name == job.runtime or other.FORMAT != mine.FORMAT or "+" in name:
            continue
        if (job.way == "autograd" and not other.AUTOGRAD) or other.missing() is not None:
            continue
        peers.append(_Peer(name, True))
    right: list[str] = []
    wrong: list[str] = []
    silent: list[str] = []
    for peer in peers:
        if right:
            break
        again = Job(peer.runtime, Path(job.artifact), job.program, job.way, job.case)
        try:
            results = scene.trials.job(again, scene.sample, optimised=peer.optimised)
            (wrong if scene.wrong(failure, results) else right).append(str(peer))
        except UnknownError as error:
            silent.append(f"{peer}: {error}")
        except FuseportError as error:
            silent.append(f"{peer}: {one_line(error)}")
    return right, wrong, silent


def _model_wrong(failure: Failure, scene: Scene) -> bool | None:
    """Whether the model is wrong in eager, where it is here; None where that cannot be asked."""
    job = failure.job
    way: Literal["run", "autograd"] = "autograd" if job.program == "gradient" else "run"
    eager = Job("eager", scene.bundle.weights, job.program, way, job.case)
    try:
        return bool(scene.wrong(failure, scene.trials.job(eager, scene.sample)))
    except UnknownError:
        return None  # without the model's code there is nothing to ask


def _bodies(right: list[str]) -> str | None:
    return next((name for name in right if "+" not in name), None)


def is_onnx(job: Job) -> bool:
    """Whether it runs an ONNX file."""
    return (runtimes.get(job.runtime).FORMAT or "").startswith("onnx")


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _also(wrong: list[str]) -> str:
    return f", and wrong in {_and(wrong)} too" if wrong else ""
