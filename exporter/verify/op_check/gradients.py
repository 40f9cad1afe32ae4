"""Checks of values and gradients: against float64, against autograd, against differences."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from fuseport.exporter.program import one_line
from fuseport.exporter.verify.baseline import (
    DOUBTFUL,
    FURTHER,
    ROUNDS,
    moved_cotangents,
    neighbour,
)
from fuseport.exporter.verify.compare import Expected, Judgement, expecting, judge, share
from fuseport.exporter.verify.measure import is_zero
from fuseport.exporter.verify.op_check.subject import (
    LAYOUTS,
    SMALL,
    Point,
    Refused,
    Subject,
    Trial,
    Unsupported,
    backward_inputs,
    contiguous,
    cotangents,
    differentiated,
    floating,
    outputs,
    points,
    size,
    tensors,
    widened,
)
from fuseport.ops.spec import Inputs, Operator

__all__ = ["Standard", "backward", "double_backward", "gradcheck", "standard", "value"]

Values = dict[str, Tensor | None]

_TINY = 60
_MOVES = 3


class Standard:
    """What is right at some inputs, and how far equally good computations are off.

    Args:
        truth: in float64.
        baselines: in the dtype under check, by plain torch.
        another: one more of these, by its number. They are asked for where a value is beyond its
            bound by so little that an unlucky baseline may be why: a second look.
    """

    def __init__(
        self, truth: Values, baselines: Sequence[Values], another: Callable[[int], Values]
    ) -> None:
        self._truth = {name: None if t is None else _real(t) for name, t in truth.items()}
        self._expected: dict[str, Expected | None] = dict.fromkeys(truth)
        self._another, self._rounds = another, 0
        for values in baselines:
            self._expect(values)

    def _expect(self, baseline: Values) -> None:
        for name, truth in self._truth.items():
            value = baseline[name]
            if truth is not None and value is not None:
                self._expected[name] = expecting(_real(value), truth, self._expected[name])

    def fault(self, found: Mapping[str, Tensor | None]) -> str | None:
        """What is wrong with the values found, all of them or some; None if nothing is."""
        for name, value in found.items():
            mine = None if value is None else _real(value)
            if mine is not None and self._truth[name] is None and is_zero(mine):
                continue  # autograd leaves out what no output depends on; operators give zeros
            judgement = self._judged(name, mine)
            while _doubtful(judgement) and self._rounds < ROUNDS:
                first = _MOVES + self._rounds * FURTHER
                self._rounds += 1
                for number in range(first, first + FURTHER):
                    self._expect(self._another(number))
                judgement = self._judged(name, mine)
            if judgement.verdict == "fail":
                return f"{name}: {judgement.reason}"
        return None

    def _judged(self, name: str, value: Tensor | None) -> Judgement:
        return judge(name, value, self._truth[name], self._expected[name])

    def closest(self, found: Mapping[str, Tensor | None]) -> tuple[float, str]:
        """How much of its bound the worst of the values takes, and the figures in words."""
        worst = (0.0, "no error anywhere")
        for name, value in found.items():
            mine = None if value is None else _real(value)
            judgement = self._judged(name, mine)
            for error, bound in (
                (judgement.max_abs_error, judgement.bound),
                (judgement.rms_error, judgement.rms_bound),
            ):
                if error and bound and error / bound > worst[0]:
                    known = f"the baseline's own is {judgement.baseline_error:.2g}"
                    words = f"{name} off by {judgement.max_abs_error:.2g}, {known}"
                    worst = error / bound, words
        return worst


def standard(subject: Subject, operator: Operator, given: Inputs, seeds: Inputs | None) -> Standard:
    """What is right for an operator, by its reference over plain copies of the inputs.

    Args:
        subject: under check.
        operator: that is computed.
        given: its inputs.
        seeds: cotangents, for gradients too; None for outputs alone.
    """
    run = operator.reference

    def compute(inputs: Inputs, cotangents: Inputs) -> Values:
        if seeds is None:
            return dict(zip(operator.outputs, outputs(run, inputs), strict=True))
        return differentiated(subject, operator, run, inputs, cotangents)

    plain, plain_seeds = contiguous(given), contiguous(seeds or {})
    baselines = [compute(plain, plain_seeds)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        baselines.append(compute(plain, plain_seeds))
    finally:
        torch.set_num_threads(before)

    def another(number: int) -> Values:
        """Of inputs and cotangents that are moved within a unit in the last place."""
        generator = torch.Generator().manual_seed(number)
        moved = {k: _moved(v, generator) if isinstance(v, Tensor) else v for k, v in plain.items()}
        return compute(moved, moved_cotangents(plain_seeds, generator))

    baselines += [another(number) for number in range(_MOVES)]
    return Standard(compute(widened(given), widened(seeds or {})), baselines, another)


def _doubtful(judgement: Judgement) -> bool:
    """Whether it is beyond its bound, and by little."""
    taken = share(
        judgement.max_abs_error, judgement.bound, judgement.rms_error, judgement.rms_bound
    )
    return judgement.verdict == "fail" and taken is not None and 1.0 < taken <= DOUBTFUL


def value(subject: Subject) -> Iterator[Trial]:
    """Outputs, in every dtype and layout, are as near to float64 as plain torch's are."""

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        _accepted(point, operator, given)
        with torch.no_grad():
            right = standard(subject, operator, given, None)
            found = outputs(operator, given)
        return right.fault(dict(zip(operator.outputs, found, strict=True)))

    return ((str(point), partial(trial, point)) for point in points(subject, layouts=True))


def backward(subject: Subject) -> Iterator[Trial]:
    """Gradients, in every dtype and layout, for random cotangents in every layout.

    They are held against autograd of the reference in float64; so is the reference's own backward,
    and the kernel's where saved outputs, too, lie in memory as the layouts have it.
    """
    _need_gradient(subject)

    def trial(point: Point, layout: str) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        _accepted(point, operator, given)
        seeds = cotangents(subject, operator, given, layout)
        right = standard(subject, operator, given, seeds)
        return right.fault(differentiated(subject, operator, operator, given, seeds))

    def alone(point: Point, name: str) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        seeds = cotangents(subject, operator, given, "as it is")
        seeds = {k: t for k, t in seeds.items() if k == "d" + name}
        right = standard(subject, operator, given, seeds)
        return right.fault(differentiated(subject, operator, operator, given, seeds))

    def explicit(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        gradient = subject.gradient(operator)
        seeds = cotangents(subject, operator, given, "as it is")
        right = standard(subject, operator, given, seeds)
        wanted = backward_inputs(subject, operator, operator.reference, given, seeds)
        found = dict(zip(gradient.outputs, outputs(gradient.reference, wanted), strict=True))
        names = subject.spec.differentiable(operator)[0]
        return right.fault({f"grad/{name}": found["d" + name] for name in names})

    def laid(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        _accepted(point, operator, given)
        gradient = subject.gradient(operator)
        seeds = cotangents(subject, operator, given, "as it is")
        right = standard(subject, operator, given, seeds)
        lay = LAYOUTS[point.layout]
        wanted = {
            k: lay(v) if isinstance(v, Tensor) and k not in given else v
            for k, v in backward_inputs(subject, operator, operator, given, seeds).items()
        }
        found = dict(zip(gradient.outputs, outputs(gradient, wanted), strict=True))
        names = subject.spec.differentiable(operator)[0]
        return right.fault({f"grad/{name}": found["d" + name] for name in names})

    seen: set[str] = set()
    layouts = list(LAYOUTS)
    for index, point in enumerate(points(subject, layouts=True)):
        operator = subject.forward(point.case)
        if operator.backward is None:
            continue
        layout = layouts[index % len(layouts)]
        yield f"{point}, cotangents {layout}", partial(trial, point, layout)
        if point.layout != "as it is" and not point.layout.startswith("expanded"):
            yield f"{point}, saved outputs {point.layout}", partial(laid, point)
        if point.dtype == point.case.dtypes[0] and point.layout == "as it is":
            yield f"{point}, the reference's backward", partial(explicit, point)
            if operator.name not in seen and len(subject.spec.differentiable(operator)[1]) > 1:
                seen.add(operator.name)
                for name in subject.spec.differentiable(operator)[1]:
                    yield f"{point}, of {name} alone", partial(alone, point, name)


def gradcheck(subject: Subject) -> Iterator[Trial]:
    """In float64, on small cases: gradients are the limits of differences."""
    _need_gradient(subject)

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), contiguous(point.inputs())
        gets, takes = subject.spec.differentiable(operator)
        for name in gets:
            given[name].requires_grad_()

        def differentiable(*values: object) -> tuple[Tensor, ...]:
            inputs = dict(zip(given, values, strict=True))
            results = dict(zip(operator.outputs, outputs(operator, inputs), strict=True))
            return tuple(results[name] for name in takes)

        fast = size(point) > _TINY
        try:
            torch.autograd.gradcheck(differentiable, tuple(given.values()), fast_mode=fast)
        except GradcheckError as error:
            if places := re.search(r"output (\d+) with respect to input (\d+)", str(error)):
                output, name = takes[int(places[1])], list(given)[int(places[2])]
                return f"the gradient of {output} by {name} is not the limit of differences"
            return one_line(error)
        return None

    for point in points(subject, torch.float64, empty=False):
        small = point.dtype == torch.float64 and size(point) <= SMALL
        if small and subject.forward(point.case).backward is not None:
            yield str(point), partial(trial, point)


def double_backward(subject: Subject) -> Iterator[Trial]:
    """Gradients of gradients are right, or are refused by an error that names the operator."""
    _need_gradient(subject)

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), contiguous(point.inputs())
        seeds = cotangents(subject, operator, given, "as it is")
        try:
            found = _twice(subject, operator, operator, given, seeds)
        except RuntimeError as error:
            name = subject.gradient(operator).qualified_name
            if name in str(error) and "not implemented" in str(error):
                return None
            return f"it is refused by an error that does not name {name}: {one_line(error)}"
        plain = _twice(subject, operator, operator.reference, given, seeds)
        for name, expected in plain.items():
            mine = found[name]
            if mine is None or expected is None:
                if mine is not expected:
                    return f"{name} is there or not, unlike the reference's"
            elif not torch.allclose(
                mine, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max())
            ):
                return f"{name} is neither right nor refused"
        return None

    for point in points(subject, torch.float64, empty=False):
        small = point.dtype == torch.float64 and size(point) <= SMALL
        if small and subject.forward(point.case).backward is not None:
            yield str(point), partial(trial, point)


def _twice(
    subject: Subject, operator: Operator, run: object, given: Inputs, seeds: Inputs
) -> Values:
    """The gradients of the sum of all gradients' squares."""
    assert callable(run)
    leaves = {
        k: v.detach().requires_grad_() if isinstance(v, Tensor) and floating(v) else v
        for k, v in given.items()
    }
    results = dict(zip(operator.outputs, outputs(run, leaves), strict=True))
    wanted = {k: t for k, t in tensors(leaves).items() if t.requires_grad}
    once = torch.autograd.grad(
        [results[name.removeprefix("d")] for name in seeds],
        list(wanted.values()),
        list(seeds.values()),
        create_graph=True,
        allow_unused=True,
    )
    total = sum((g.abs().square().sum() for g in once if g is not None), torch.zeros(()))
    assert isinstance(total, Tensor)
    if not total.requires_grad:  # a linear operator's gradients depend on no input
        return dict.fromkeys(wanted)
    twice = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, twice, strict=True))


def _need_gradient(subject: Subject) -> None:
    if not subject.with_gradient:
        raise Unsupported("no operator of the op names a backward")


def _accepted(point: Point, operator: Operator, given: Inputs) -> None:
    """A layout of ours that the reference refuses is no trial."""
    if point.layout != "as it is":
        try:
            operator.fake(*given.values())
        except ValueError as error:
            raise Refused(str(error)) from error


def _moved(t: Tensor, generator: torch.Generator) -> Tensor:
    if t.is_complex():
        return torch.view_as_complex(neighbour(torch.view_as_real(t), generator))
    return neighbour(t, generator)


def _real(t: Tensor) -> Tensor:
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
