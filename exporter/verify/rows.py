"""Answers and truth → the rows of a report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError

from fuseport.exporter import runtimes
from fuseport.exporter.verify.compare import Expected, Judgement, Tolerance, Verdict, judge
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import FLOAT64, Row
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample, Truth, opened

__all__ = ["judged", "repeated", "whole"]

# Truth computed on another machine agrees to rounding in float64, amplified by the model's depth:
# relative to the tensor, and to what rounding does to it in the working dtype.
_STORED_RTOL = 1e-8
_STORED_BASELINE = 1e-6


def whole(runtime: str, judgement: Judgement, *, case: str = "*") -> Row:
    """A row that speaks of a whole runtime or case."""
    return Row(runtime, None, "*", "*", "run", case, "*", judgement.verdict, judgement.reason)


def judged(
    answer: Answer,
    sample: Sample,
    program: Mapping[str, Any],
    tolerance: Tolerance | None,
) -> Iterator[Row]:
    """The rows of one job: one for each tensor, or one for all where nothing can be compared.

    Args:
        answer: of a runtime.
        sample: the case.
        program: the forward one, as the manifest has it.
        tolerance: the user's, instead of the rule.
    """
    job = answer.job
    if answer.status != "done":
        verdict: Verdict = "unsupported" if answer.status == "unsupported" else "error"
        judgement = Judgement(verdict, answer.reason)
        yield _row(job, "*", judgement, crash=answer.status == "crash")
        return
    for name in answer.mutated:
        yield _row(job, name, Judgement("fail", "the runtime changed this input in place"))
    expected = [spec["name"] for spec in program["outputs"]]
    if job.program == "gradient":
        expected += [n for n in [*sample.expected, *sample.none] if n.startswith("grad/")]
    try:
        for call in answer.calls or {}:
            for name, judgement in _of_call(answer, call, expected, sample, tolerance):
                if call == 1:
                    yield _row(job, name, judgement)
                elif judgement.verdict == "fail":
                    reason = f"at call {call}, which differs from the first: {judgement.reason}"
                    yield _row(job, name, replace(judgement, reason=reason))
    except (OSError, SafetensorError) as error:
        yield _row(job, "*", Judgement("error", f"its results cannot be read: {error}"))


def repeated(stored: Sequence[Sample], computed: Sequence[Sample]) -> Iterator[Row]:
    """Hold the truth of the model built again against that of the model that was exported."""
    then = {sample.case.name: sample for sample in stored}
    for sample in computed:
        before = then[sample.case.name]
        if before.refused is not None or sample.refused is not None:
            continue
        with opened(before) as exact, opened(sample) as again:
            for name, known in sample.expected.items():
                if name in before.omitted:
                    continue
                judgement = _judge_stored(name, known, exact, again)
                yield Row(
                    runtime=FLOAT64,
                    provider=None,
                    artifact="samples",
                    program="gradient" if name.startswith("grad/") else "forward",
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
    return judge(name, value, stored, expected, tolerance)


def _of_call(
    answer: Answer,
    call: int,
    expected: Sequence[str],
    sample: Sample,
    tolerance: Tolerance | None,
) -> Iterator[tuple[str, Judgement]]:
    missing = dict.fromkeys(expected)
    with opened(sample) as exact:
        for name, tensor in answer.tensors(call):
            missing.pop(name, None)
            known = sample.expected.get(name)
            if name in sample.omitted:
                reason = "its truth is too large to be stored in the bundle: give --model"
                yield name, Judgement("unsupported", reason)
            elif name in sample.unstable:
                reason = "unstable: the model itself does not repeat it bit for bit"
                yield name, Judgement("unsupported", reason)
            elif known is None and name not in sample.none:
                yield name, Judgement("fail", "the model has nothing of this name")
            else:
                value = None if known is None else exact(name)
                yield name, judge(name, tensor, value, known, tolerance)
        for name in missing:
            value = exact(name) if name in sample.expected and name not in sample.omitted else None
            if value is None and name not in sample.none:
                yield name, Judgement("fail", "not given, where the model has it")
            else:
                yield name, judge(name, None, value, sample.expected.get(name), tolerance)


def _row(job: Job, tensor: str, judgement: Judgement, *, crash: bool = False) -> Row:
    runtime = runtimes.get(job.runtime)
    return Row(
        runtime=job.runtime,
        provider=getattr(runtime, "PROVIDER", None),
        artifact="model" if runtime.FORMAT is None else job.artifact.name,
        program=job.program,
        way=job.way,
        case=job.case,
        tensor=tensor,
        crash=crash,
        **vars(judgement),
    )
