"""Answers and truth → the rows of a report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError

from fuseport.exporter import runtimes
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.verify.compare import Expected, Judgement, Tolerance, Verdict, judge, share
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import FLOAT64, OWN_BACKWARD, Row
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample, Truth, opened
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["judged", "repeated", "whole"]

# Truth computed on another machine agrees to rounding in float64, amplified by the model's depth:
# relative to the tensor, and to what rounding does to it in the working dtype.
_STORED_RTOL = 1e-8
_STORED_BASELINE = 1e-6

# How much of its bound an error may take that comes of a choice, and which part of a tensor's scale
# a bound may be that tells something.
_BY_CHOICE = 2.0
_DIGIT = 4.0

_UNSTABLE = Judgement("unsupported", "unstable: two runs of the model itself differ")

_UNDECIDED = Judgement("unsupported", "undecided: rounding decides, in float64, what is chosen")


def whole(runtime: str, judgement: Judgement, *, case: str = "*") -> Row:
    """A row that speaks of a whole runtime or case."""
    return Row(runtime, None, "*", "*", "run", case, "*", judgement.verdict, judgement.reason)


def judged(
    answer: Answer,
    sample: Sample,
    program: Mapping[str, Any],
    tolerances: Tolerances | None,
) -> Iterator[Row]:
    """The rows of one job: one for each tensor, or one for all where nothing can be compared.

    Args:
        answer: of a runtime.
        sample: the case.
        program: that of the case's entry, as the manifest has it.
        tolerances: the user's, instead of the rule.
    """
    job = answer.job
    if answer.status != "done":
        verdict: Verdict = "unsupported" if answer.status == "unsupported" else "error"
        judgement = Judgement(verdict, answer.reason)
        yield _row(job, program, "*", judgement, crash=answer.status == "crash")
        return
    for name in answer.mutated:
        yield _row(job, program, name, Judgement("fail", "the runtime changed this input in place"))
    if job.way.endswith("forms"):
        yield from _of_forms(answer, sample, program, tolerances)
        return
    expected = [spec["name"] for spec in program["outputs"]]
    if job.program == "gradient":
        expected += [n for n in [*sample.expected, *sample.none] if n.startswith("grad/")]
    # As the model has them: a file has its tensors by name.
    place = {name: i for i, name in enumerate(expected)}
    try:
        functions = _own_functions(job, program)
        for call in answer.calls or {}:
            found = _of_call(answer, call, expected, sample, program, tolerances)
            for name, judgement in sorted(found, key=lambda pair: place.get(pair[0], len(place))):
                if name.startswith("grad/"):
                    judgement = _explained(judgement, functions, program, drew=answer.drew)
                way = OWN_BACKWARD if functions else job.way
                if call == 1:
                    yield replace(_row(job, program, name, judgement), way=way)
                elif judgement.verdict == "fail":
                    reason = f"at call {call}, which differs from the first: {judgement.reason}"
                    judgement = replace(judgement, reason=reason)
                    yield replace(_row(job, program, name, judgement), way=way)
    except (OSError, SafetensorError) as error:
        yield _row(job, program, "*", Judgement("error", f"its results cannot be read: {error}"))


def repeated(stored: Sequence[Sample], computed: Sequence[Sample]) -> Iterator[Row]:
    """Hold the truth of the model built again against that of the model that was exported."""
    then = {sample.case.name: sample for sample in stored}
    for sample in computed:
        before = then.get(sample.case.name)
        if before is None:  # of another seed, which the export did not compute
            continue
        if before.refused is not None or sample.refused is not None:
            continue
        with opened(before) as exact, opened(sample) as again:
            for name, known in sample.expected.items():
                if name in before.omitted:
                    continue
                if name in before.unstable or name in sample.unstable:
                    judgement = _UNSTABLE
                else:
                    judgement = _judge_stored(name, known, exact, again)
                    if judgement.would_pass_at and (before.undecided or sample.undecided):
                        judgement = _UNDECIDED if judgement.verdict == "fail" else judgement
                yield Row(
                    runtime=FLOAT64,
                    provider=None,
                    artifact="samples",
                    program="gradient" if name.startswith("grad/") else sample.case.entry,
                    way="run",
                    case=sample.case.name,
                    tensor=name,
                    **vars(judgement),
                )


def _judge_stored(name: str, known: Expected, exact: Truth, again: Truth) -> Judgement:
    value, stored = again(name), exact(name)
    atol = _STORED_RTOL * known.scale.max_abs + _STORED_BASELINE * known.baseline.max_abs
    tolerance = Tolerance(atol, _STORED_RTOL)
    dtype = str(stored.dtype).removeprefix("torch.")
    expected = Expected(dtype, known.scale, Norms(0.0, 0.0), zero=True)
    judgement = judge(name, value, stored, expected, tolerance)
    if judgement.verdict != "fail":
        return judgement
    off = str(judgement.reason).removesuffix(", beyond the tolerance given")
    return replace(judgement, reason=f"the model itself is not as at the export: {off}")


def _of_call(
    answer: Answer,
    call: int,
    expected: Sequence[str],
    sample: Sample,
    program: Mapping[str, Any],
    tolerances: Tolerances | None,
) -> Iterator[tuple[str, Judgement]]:
    given = tolerances or Tolerances()
    missing = dict.fromkeys(expected)
    with opened(sample) as exact:
        for name, tensor in answer.tensors(call):
            missing.pop(name, None)
            known = sample.expected.get(name)
            if name in sample.omitted:
                reason = "its truth is too large to be stored in the bundle: give --model"
                yield name, Judgement("unsupported", reason)
            elif name in sample.unstable:
                yield name, _UNSTABLE
            elif known is None and name not in sample.none:
                yield show(name), Judgement("fail", "the model has nothing of this name")
            elif (
                known is None
                and not tensor.count_nonzero()
                and ("both_ways" in program or name in sample.absent)
            ):
                yield name, Judgement("pass")  # of a parameter that is not on the model's way
            else:
                value = None if known is None else exact(name)
                judgement = judge(name, tensor, value, known, given.of(name))
                if given.of(name) is None and known is not None:
                    judgement = _decided(name, judgement, known, sample)
                yield name, judgement
        for name in missing:
            value = exact(name) if name in sample.expected and name not in sample.omitted else None
            if value is None and name not in sample.none:
                yield name, Judgement("fail", "not given, where the model has it")
            else:
                yield name, judge(name, None, value, sample.expected.get(name))


def _decided(name: str, judgement: Judgement, known: Expected, sample: Sample) -> Judgement:
    """The judgement, or none where it rests on errors that are as large as what is compared.

    The model's own results are off by as much where rounding decides what it chooses: then a bound
    of them is none. What is far beyond that, or wrong in another way than by its errors, is wrong.
    Without choices, as where large numbers cancel, a bound is none that zeros are within.
    """
    dtype = getattr(torch, known.dtype)
    if judgement.bound is None or judgement.would_pass_at is None or not dtype.is_floating_point:
        return judgement
    rounding = torch.finfo(dtype).eps ** 0.5
    error, scale = known.baseline.max_abs, known.scale.max_abs
    if judgement.verdict == "fail":
        errors = judgement.max_abs_error, judgement.bound, judgement.rms_error, judgement.rms_bound
        of_choice = bool(sample.undecided) and (share(*errors) or 0.0) <= _BY_CHOICE
        lost = of_choice and error > rounding * scale
    else:
        least = scale / _DIGIT if sample.undecided else scale
        lost = judgement.bound > least and error > rounding * _largest(name, sample)
    if not lost:
        return judgement
    if not sample.undecided:
        return Judgement(
            "unsupported",
            f"in {known.dtype} the model's own results are off by as much as they are, so that "
            "zeros would pass",
        )
    return Judgement(
        "unsupported",
        f"undecided: in {known.dtype} rounding decides what {', '.join(sample.undecided)} gives, "
        "and the model's own results differ by more than rounding",
    )


def _largest(name: str, sample: Sample) -> float:
    """Of the scales of all gradients, or of all outputs, whichever the tensor is one of."""
    is_gradient = name.startswith("grad/")
    known = sample.expected.items()
    return max(e.scale.max_abs for n, e in known if n.startswith("grad/") == is_gradient)


def _of_forms(
    answer: Answer,
    sample: Sample,
    program: Mapping[str, Any],
    tolerances: Tolerances | None,
) -> Iterator[Row]:
    """A row for each form of backward: it is the plain gradient, which other rows judge, bit for
    bit, or within the bounds of the truth by itself."""
    functions = _own_functions(answer.job, program)
    for name, call, error in answer.forms:
        judgement = Judgement("pass")
        if error is not None and functions and own_backward.in_place(error) is not None:
            judgement = Judgement(
                "unsupported",
                "the model's own backward writes into what its forward has saved, and so can be "
                "asked for once",
            )
        elif error is not None and _WITHIN_FUNC in error:
            judgement = Judgement(
                "unsupported", "torch does not have it of code that calls torch.func's functions"
            )
        elif error is not None:
            judgement = Judgement("fail", f"backward fails when it is asked for so: {error}")
        elif call is not None:
            try:
                given = [tensor for tensor, _ in answer.tensors(call)]
                found = dict(_of_call(answer, call, given, sample, program, tolerances))
            except (OSError, SafetensorError) as broken:
                judgement = Judgement("error", f"its results cannot be read: {broken}")
            else:
                tensor, judgement = max(found.items(), key=lambda pair: _badness(pair[1]))
                if judgement.verdict == "fail":
                    judgement = replace(judgement, reason=f"{tensor}: {judgement.reason}")
        judgement = _explained(judgement, functions, program, drew=answer.drew)
        row = _row(answer.job, program, name, judgement)
        yield replace(row, way=OWN_BACKWARD) if functions else row


_WITHIN_FUNC = "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks"


def _badness(judgement: Judgement) -> tuple[int, float]:
    error, bound = judgement.max_abs_error or 0.0, judgement.bound or 1.0
    return ("pass", "unsupported", "fail").index(judgement.verdict), error / bound


def _own_functions(job: Job, program: Mapping[str, Any]) -> Sequence[str]:
    """The model's own autograd functions, where the job goes through their backward."""
    if runtimes.get(job.runtime).FORMAT is not None or not job.way.startswith("autograd"):
        return ()
    functions: Sequence[str] = program["architecture"]["config"].get("functions", ())
    return functions


def _explained(
    judgement: Judgement, functions: Sequence[str], program: Mapping[str, Any], *, drew: bool
) -> Judgement:
    """Who is at fault: not the kernel, and no artifact; nobody where a backward draws at random."""
    if not functions or judgement.verdict != "fail":
        return judgement
    if drew:
        return Judgement(
            "unsupported",
            "the model draws random numbers where its gradient is asked for: its own backward is "
            "another at each call, and artifacts have the gradient of its forward",
        )
    config = program["architecture"]["config"]
    named = ", ".join(config.get("wrong", functions))
    reason = (
        f"the model's own backward ({named}) is not the gradient of its forward, which artifacts "
        f"have: {judgement.reason}"
    )
    if unseen := config.get("unseen"):
        reason = (
            f"the gradient of {', '.join(unseen)}, whose forward autograd does not see, is in no "
            f"artifact: {judgement.reason}"
        )
    return replace(judgement, reason=reason)


def _row(
    job: Job,
    program: Mapping[str, Any],
    tensor: str,
    judgement: Judgement,
    *,
    crash: bool = False,
) -> Row:
    runtime = runtimes.get(job.runtime)
    return Row(
        runtime=job.runtime,
        provider=runtimes.devices(job.runtime).get(program.get("device", "cpu")),
        artifact="model" if runtime.FORMAT is None else job.artifact.name,
        program=job.program,
        way=job.way,
        case=job.case,
        tensor=tensor,
        crash=crash,
        **vars(judgement),
    )
