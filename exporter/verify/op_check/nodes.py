"""Checks of an op in ONNX: bodies of its nodes, native operators, fused kernels."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fuseport.exporter.formats import DEFAULT_OPSET
from fuseport.exporter.inspect.single_assignment import first_fault
from fuseport.exporter.runtimes._onnxruntime import missing
from fuseport.exporter.verify.op_check.contract import calls
from fuseport.exporter.verify.op_check.gradients import standard
from fuseport.exporter.verify.op_check.subject import (
    Point,
    Subject,
    Trial,
    Unsupported,
    backward_inputs,
    contiguous,
    cotangents,
    outputs,
    points,
    size,
)
from fuseport.exporter.verify.op_check.symbolic import Evaluator, Nodes, Origin, Runner, Session
from fuseport.ops import OPS, build, ort
from fuseport.ops.lowering import Lowering
from fuseport.ops.spec import Inputs, Operator, as_tuple

__all__ = ["bodies", "fused", "native"]

_EVALUATED = 2_000  # elements of the inputs: onnx's evaluator is a Python loop
_BODY_DTYPES = (torch.float32, torch.float64, torch.float16)  # that ONNX Runtime computes in


def bodies(subject: Subject) -> Iterator[Trial]:
    """Function bodies, run by ONNX Runtime and by onnx's evaluator, compute what the op does.

    Forward and backward, on the cases that have a form in ONNX; the others are refused.
    """
    lowering = _lowering(subject)
    runners: dict[str, Runner] = {"onnx's evaluator": Evaluator(lowering)}
    if missing() is None:
        runners["ONNX Runtime"] = Session(lowering)

    def trial(point: Point, runner: Runner) -> str | None:
        operator, given = subject.forward(point.case), contiguous(point.inputs())
        seeds = cotangents(subject, operator, given, "as it is") if operator.backward else None
        right = standard(subject, operator, given, seeds)
        found, origins = _lowered(lowering, runner, operator, list(given.values()))
        kept = zip(operator.outputs, found, origins, strict=True)
        if reason := right.fault({name: y for name, y, origin in kept if origin}):
            return reason
        if seeds is None:
            return None
        gradient = subject.gradient(operator)
        if gradient.name not in lowering.decompositions():
            return f"there is no form of {gradient.qualified_name}, which gradient.onnx needs"
        wanted = backward_inputs(subject, operator, operator.reference, given, seeds)
        found, _ = _lowered(lowering, runner, gradient, list(wanted.values()))
        by_name = dict(zip(gradient.outputs, found, strict=True))
        names = subject.spec.differentiable(operator)[0]
        return right.fault({f"grad/{name}": by_name["d" + name] for name in names})

    for function in lowering.functions(DEFAULT_OPSET):
        yield f"the body of {function.name}", partial(first_fault, [function])
    for point in points(subject, *_BODY_DTYPES, empty=False):
        if not point.case.lowers:
            if point.dtype == point.case.dtypes[0]:
                for operator, make in calls(subject, point):
                    where = f"{operator.name}, {point}, without a form in ONNX"
                    yield where, partial(_refused, lowering, operator, make)
            continue
        for name, runner in runners.items():
            small = size(point) <= _EVALUATED and point.dtype != torch.float16
            if point.dtype in _BODY_DTYPES and (name == "ONNX Runtime" or small):
                yield f"{point}, {name}", partial(trial, point, runner)


def fused(subject: Subject) -> Iterator[Trial]:
    """Kernels inside ONNX Runtime give the bits of torch's, on one thread and on two.

    So where an output is the node's own; what is reshaped around nodes may be summed otherwise, and
    has to be as near to float64 as plain torch's.
    """
    lowering = _lowering(subject)
    if not subject.spec.has("ort.cpp"):
        raise Unsupported("the op has no ort.cpp")
    if reason := missing():
        raise Unsupported(reason)
    try:
        library = ort.library(OPS.values())
    except build.BuildError as error:
        raise Unsupported(str(error)) from error

    def trial(operator: Operator, make: Callable[[], Inputs], runner: Runner) -> str | None:
        given = contiguous(make())
        found, origins = _lowered(lowering, runner, operator, list(given.values()))
        expected = outputs(operator, given)
        compared = list(zip(operator.outputs, found, expected, origins, strict=True))
        for name, mine, torchs, origin in compared:
            if origin == "node" and (reason := _apart(mine, torchs)):
                return f"{name} {reason}"
        others = {name: mine for name, mine, _, origin in compared if origin == "around"}
        return standard(subject, operator, given, None).fault(others) if others else None

    runners = {count: Session(None, str(library), count) for count in (1, 2)}
    for point in points(subject):
        if point.case.lowers:
            for operator, make in calls(subject, point):
                for count, runner in runners.items():
                    where = f"{operator.name}, {point}, threads: {count}"
                    yield where, partial(trial, operator, make, runner)


def native(subject: Subject) -> Iterator[Trial]:
    """Operators of ONNX or ONNX Runtime that the op has a form in compute what the op does."""
    if not subject.spec.has("onnx_native.py"):
        why = subject.spec.lacks.get("ONNX native", "the op has no onnx_native.py")
        raise Unsupported(why)
    if reason := missing():
        raise Unsupported(reason)
    forms, runner = subject.spec.native_lowering().decompositions(), Session(None)

    def trial(operator: Operator, point: Point) -> str | None:
        given = contiguous(point.inputs())
        nodes = Nodes(runner, list(given.values()))
        with nodes, torch.no_grad():
            results = forms[operator.name](*given.values())
        by_name = dict(zip(operator.outputs, as_tuple(results), strict=True))
        found = {name: y for name, y in by_name.items() if nodes.origin(y)}
        return standard(subject, operator, given, None).fault(found)

    tried = False
    for point in points(subject, *_BODY_DTYPES, empty=False):
        operator = subject.forward(point.case)
        if operator.name in forms and _has_form(forms[operator.name], point):
            tried = True
            yield f"{operator.name}, {point}", partial(trial, operator, point)
    if not tried:
        raise Unsupported("none of the cases has a form in it")


def _has_form(form: Callable[..., Any], point: Point) -> bool:
    given = contiguous(point.inputs())
    with FakeTensorMode(allow_non_fake_inputs=True):
        return form(*given.values()) is not None


def _lowering(subject: Subject) -> Lowering:
    if not subject.spec.lowers:
        raise Unsupported("the op has no form in ONNX")
    return subject.spec.lowering()


def _refused(lowering: Lowering, operator: Operator, make: Callable[[], Inputs]) -> str | None:
    try:
        lowering.decompositions()[operator.name](*make().values())
    except ValueError:
        return None
    return "the lowering takes a case that it has no form of"


def _lowered(
    lowering: Lowering, runner: Runner, operator: Operator, given: Sequence[Any]
) -> tuple[tuple[Tensor, ...], list[Origin]]:
    """What an operator's decomposition computes, its nodes in a runtime.

    Beside the outputs, where each comes from. Saved outputs that the backward node does without
    come from none, and hold nothing.
    """
    nodes = Nodes(runner, given)
    with nodes, torch.no_grad():
        found = lowering.decompositions()[operator.name](*given)
    results = as_tuple(found)
    return results, [nodes.origin(result) for result in results]


def _apart(one: Tensor, other: Tensor) -> str | None:
    """How two tensors differ, but for the bits of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
    same = (one == other) | (one.isnan() & other.isnan())
    if not bool(same.all()) or not torch.equal(one.signbit(), other.signbit()):
        return f"has other bits than torch's in {int((~same).sum())} of {same.numel()} elements"
    return None
