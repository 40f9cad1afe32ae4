"""The check that an op's gradient does not depend on how backward is asked for."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fuseport.exporter.program.backward_forms import FORMS, Asked, agree, plain
from fuseport.exporter.verify.op_check.gradients import standard
from fuseport.exporter.verify.op_check.subject import (
    Point,
    Refused,
    Subject,
    Trial,
    Unsupported,
    cotangents,
    outputs,
    points,
    tensors,
)
from fuseport.ops.spec import Inputs, Operator

__all__ = ["backward_forms"]


def backward_forms(subject: Subject) -> Iterator[Trial]:
    """Every form of backward gives the plain one's gradient; of each operator in half, too.

    See `program/backward_forms.py`; and where two inputs are alike, one tensor passed for both has
    the sum of their gradients. A form that differs in its bits is held against float64.
    """
    if not subject.with_gradient:
        raise Unsupported("no operator of the op names a backward")

    def trial(point: Point, name: str) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        asked = _asked(subject, operator, given)
        expected = plain(asked)
        for found, factor in FORMS[name](asked):
            for key, gradient in found.items():
                if not agree(gradient, expected[key], factor):
                    mine = None if gradient is None else gradient / factor
                    fault = _fault(subject, operator, given, asked, f"grad/{key}", mine)
                    if fault is not None:
                        return f"{name}: {fault}"
        return None

    def shared(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        first, second = _alike(operator, given, subject)
        given = {**given, second: given[first].detach().clone()}
        asked = _asked(subject, operator, given)
        apart = plain(asked)
        one = {n: v for n, v in given.items() if n != second}

        def run(inputs: Mapping[str, object]) -> Mapping[str, Tensor]:
            both = {n: inputs[first] if n == second else inputs[n] for n in given}
            return asked.run(both)

        found = plain(Asked(run, one, {}, asked.cotangents))[first]
        parts = [g for g in (apart[first], apart[second]) if g is not None]
        total = None if not parts else sum(parts[1:], parts[0])
        if agree(found, total, 1.0):
            return None
        return f"{first} passed for {second} too: its gradient is not the sum of both"

    seen: set[tuple[str, torch.dtype]] = set()
    for point in points(subject, torch.float32, torch.bfloat16, empty=False):
        operator = subject.forward(point.case)
        known = (operator.name, point.dtype) in seen
        if operator.backward is None or (known and point.dtype == torch.bfloat16):
            continue
        seen.add((operator.name, point.dtype))
        for name in FORMS:
            yield f"{point}", partial(trial, point, name)
        yield f"{point}", partial(shared, point)


def _asked(subject: Subject, operator: Operator, given: Inputs) -> Asked:
    seeds = cotangents(subject, operator, given, "as it is")

    def run(inputs: Mapping[str, object]) -> Mapping[str, Tensor]:
        found = outputs(operator, cast(Inputs, inputs))
        return dict(zip(operator.outputs, found, strict=True))

    return Asked(run, given, {}, {name.removeprefix("d"): t for name, t in seeds.items()})


def _fault(
    subject: Subject,
    operator: Operator,
    given: Inputs,
    asked: Asked,
    name: str,
    found: Tensor | None,
) -> str | None:
    seeds = {f"d{output}": t for output, t in asked.cotangents.items()}
    return standard(subject, operator, given, seeds).fault({name: found})


def _alike(operator: Operator, given: Inputs, subject: Subject) -> tuple[str, str]:
    """Two inputs with gradients that could be one tensor."""
    able = [tensors(given)[n] for n in subject.spec.differentiable(operator)[0] if n in given]
    names = [n for n in subject.spec.differentiable(operator)[0] if n in given]
    for i, one in enumerate(able):
        for j, other in enumerate(able[:i]):
            alike = one.shape == other.shape and one.dtype == other.dtype
            if alike and one.stride() == other.stride():
                return names[j], names[i]
    raise Refused("no two inputs are alike")
