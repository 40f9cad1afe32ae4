"""One failure → where it begins and who is at fault."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fuseport.exporter import runtimes
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.program import one_line
from fuseport.exporter.verify.diagnosis import Diagnosis, Divergence
from fuseport.exporter.verify.localise import candidates, other_weights, parts
from fuseport.exporter.verify.localise.attribution import Fault, attributed, is_onnx
from fuseport.exporter.verify.localise.look import Alone, Forward, Look
from fuseport.exporter.verify.localise.look_back import Backward
from fuseport.exporter.verify.localise.scene import Failure, Scene
from fuseport.exporter.verify.localise.search import Found, first_wrong
from fuseport.exporter.verify.localise.trial import UnknownError

__all__ = ["Finding", "investigated"]

_TRIES = 6  # values that were wrong only for what they were computed from


class _AbsentError(UnknownError):
    """What failed is not there, and so begins nowhere."""


@dataclass(frozen=True)
class Finding:
    """What came of an investigation.

    Attributes:
        diagnosis: for the report.
        alone: the suspects by themselves, where they are wrong there.
    """

    diagnosis: Diagnosis
    alone: Alone | None


def investigated(
    failure: Failure, scene: Scene, progress: Callable[[str], None] = lambda _: None
) -> Finding:
    """Look into a failure."""
    job = failure.job
    divergence: Divergence | None = None
    alone: Alone | None = None
    eager: Alone | None = None
    method = None
    try:
        progress("looking for where it begins")
        look, found, alone = _found(failure, scene)
        method = look.candidate.method
        divergence = replace(
            look.divergence(found), alone="wrong here" if alone.wrong else "carried here"
        )
        located = _sentence(found, alone, divergence)
        if not is_onnx(job):  # whose ops are run by none of torch's kernels
            eager = look.by_torch().alone(replace(found, vanished=True))
    except _AbsentError as error:
        located = str(error)
    except UnknownError as error:
        located = f"where it begins is not known: {error}"
    except (LookupError, FuseportError) as error:
        located = f"where it begins is not known: {one_line(error)}"
    progress("asking who is at fault")
    op = None if divergence is None else divergence.op
    fault: Fault = attributed(failure, scene, op, alone, eager)
    diagnosis = Diagnosis(
        runtime=job.runtime,
        artifact=failure.artifact,
        program=job.program,
        way=job.way,
        case=job.case,
        cause=fault.cause,
        reason="; ".join(filter(None, (fault.reason, located, _weights(failure, scene)))),
        divergence=divergence,
        method=None if divergence is None else method,
    )
    shown = alone if alone is not None and alone.judgement.verdict == "fail" else None
    return Finding(diagnosis, shown)


def _weights(failure: Failure, scene: Scene) -> str | None:
    """Which of the artifact's weights are not the model's, if any."""
    job = failure.job
    if runtimes.get(job.runtime).FORMAT is None:
        return None
    try:
        return other_weights.sentence(job.runtime, job.artifact, scene.bundle.weights)
    except (FuseportError, runtimes.Unsupported) as error:
        return f"its weights cannot be compared: {one_line(error)}"


def _found(failure: Failure, scene: Scene) -> tuple[Look, Found, Alone]:
    """What the first candidate that shows the fault says of it."""
    reasons: list[str] = []
    for look, target in _looks(failure, scene):
        try:
            return look, *_searched(look, target, scene.budget)
        except UnknownError as error:
            reasons.append(str(error))
    try:
        absent = scene.absent(failure)
    except UnknownError as error:  # it does not run again
        absent = ()
        reasons.append(str(error))
    if absent:
        raise _AbsentError(f"it gives no {', '.join(absent)}")
    raise UnknownError("; ".join(dict.fromkeys(reasons)))


def _looks(failure: Failure, scene: Scene) -> Iterator[tuple[Look, str]]:
    """How to look into a failure, and the wrong value to begin with."""
    job = failure.job
    kind = job.program
    surplus = scene.surplus(failure)
    wrong = [name for name in failure.tensors if name not in surplus]
    if not wrong:
        raise UnknownError(
            f"it gives {', '.join(surplus)}, of which the model's program has no value"
        )
    outputs = [name for name in wrong if not name.startswith("grad/")]
    backwards = job.way == "autograd" and not outputs
    if job.way == "autograd":
        kind = "forward"
    if kind not in scene.programs:
        raise UnknownError(f"there is no {kind} program to look into")
    program = scene.programs[kind]
    of = job.runtime, job.artifact, program, scene.facts(job.artifact), scene.bundle.weights
    inputs, cotangents = scene.tensors(kind)
    node_of = parts.node_of(program)
    place = {node.name: i for i, node in enumerate(program.exported.graph.nodes)}
    if backwards:
        wanted = [name.removeprefix("grad/") for name in wrong]
        targets = [node_of[name] for name in wanted if name in node_of]
        if not targets:
            raise UnknownError(f"{wanted[0]} is no input and no parameter of the program")
        for candidate in candidates.differentiable(*of):
            back = Backward(program, candidate, scene.trials, inputs, cotangents)
            if candidate.method == "bisection" and not scene.wrong(failure, back.whole()):
                raise UnknownError(
                    f"the model's program, written anew over the weights of {failure.artifact}, is "
                    "right, so that the fault is in the operators of the file"
                )
            # The one whose last use comes last: autograd comes to that first.
            last = {n: max((place[u] for u in back.needs[n]), default=-1) for n in targets}
            yield back, max(targets, key=lambda name: last[name])
        return
    named = outputs if job.way == "autograd" else wrong
    targets = [node_of[name] for name in named if name in node_of]
    if not targets:
        raise UnknownError(f"{named[0]} is no output of the program")
    for each in candidates.of(*of):
        forward = Forward(program, each, scene.trials, inputs)
        yield forward, min(targets, key=lambda name: place[name])


def _searched(look: Look, target: str, budget: int) -> tuple[Found, Alone]:
    """The first wrong value that is wrong by its own op's doing; or else the first one."""
    first: tuple[Found, Alone] | None = None
    known: set[str] = set()
    for _ in range(_TRIES):
        found = first_wrong(look.needs, target, look.sizes, look.wrong, budget, frozenset(known))
        if found.value == target and target in look.sizes and not look.wrong([target]):
            raise UnknownError(
                "all values inside are within their own bounds, so that small errors add up to it, "
                "or it is an output's shape or type, or what the runtime makes of the file as it is"
            )
        alone = look.alone(found)
        first = first or (found, alone)
        if alone.wrong:
            return found, alone
        if found.value == target:
            break
        known.add(found.value)
    assert first is not None
    return first


def _sentence(found: Found, alone: Alone, divergence: Divergence) -> str:
    """Where it begins, in words."""
    what = f"{divergence.op}, {divergence.direction}"
    where = f"{divergence.module}: {what}" if divergence.module else what
    if not alone.wrong:
        return f"it shows first at {where}, which is right on reference inputs"
    if alone.judgement.verdict == "fail":
        return f"it begins at {where}, which is wrong on reference inputs too"
    return f"it begins at {where}, right alone and wrong only within the whole"
