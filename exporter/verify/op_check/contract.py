"""Checks that an op keeps torch's rules: it repeats itself, leaves inputs alone, has true fakes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.exporter.verify.op_check.subject import (
    LAYOUTS,
    Point,
    Refused,
    Subject,
    Trial,
    backward_inputs,
    cotangents,
    differentiated,
    floating,
    outputs,
    points,
    same_bits,
    size,
    tensors,
    unlike,
)
from fuseport.ops.spec import Inputs, Operator

__all__ = ["calls", "fake", "inputs", "opcheck", "third_call", "threads"]

_THREADS = (1, 2, 3)
_LARGEST = 3


def third_call(subject: Subject) -> Iterator[Trial]:
    """Three calls in a row give the same bits, gradients included."""

    def trial(point: Point) -> str | None:
        once, again = (tensors(point.inputs()) for _ in range(2))
        if not all(same_bits(once[name], again[name]) for name in once):
            return "the case itself gives other inputs each time: draw them with its seed"
        first = _run(subject, point)
        for number in ("second", "third"):
            if reason := unlike(first, _run(subject, point), f"in the {number} call"):
                return reason
        return None

    return ((str(point), partial(trial, point)) for point in points(subject, torch.float32))


def threads(subject: Subject) -> Iterator[Trial]:
    """The bits do not depend on the number of threads; on the largest cases, which use them.

    Or they are those of the reference with each number: torch's own products may depend on it.
    """

    def trial(point: Point) -> str | None:
        runs = {}
        for count in _THREADS:
            with _threads(count):
                runs[count] = _run(subject, point)
        for count in _THREADS[1:]:
            reason = unlike(runs[1], runs[count], f"with {count} threads than with 1")
            if reason is None:
                continue
            for number in (1, count):
                with _threads(number):
                    plain = _by_reference(subject, point)
                if unlike(plain, runs[number], ""):
                    return reason
        return None

    chosen = (torch.float32, torch.bfloat16)
    largest = sorted(points(subject, *chosen), key=size, reverse=True)[: _LARGEST * len(chosen)]
    return ((str(point), partial(trial, point)) for point in largest)


def inputs(subject: Subject) -> Iterator[Trial]:
    """Inputs stay as they are, and wrong ones are refused alike by kernel, reference and fake."""
    for point in points(subject, torch.float32, layouts=True):
        for operator, make in calls(subject, point):
            yield f"{operator.name}, {point}", partial(_untouched, operator, make)
    seen: set[tuple[Any, ...]] = set()
    for point in points(subject, torch.float32, empty=False):
        kind = (point.case.operator, *(t.dim() for t in tensors(point.inputs()).values()))
        if kind in seen:
            continue
        seen.add(kind)
        for operator, make in calls(subject, point):
            for name in tensors(make()):
                for fault in _FAULTS:
                    where = f"{operator.name}, {point}, {name} of {fault}"
                    yield where, partial(_refused_alike, operator, make, name, fault)


def fake(subject: Subject) -> Iterator[Trial]:
    """Under FakeTensorMode outputs have the shapes, dtypes and strides that kernels give them.

    Also where one input alone is transposed: plain torch follows the first of its operands.
    """
    for point in points(subject, torch.float32, torch.bfloat16, layouts=True):
        for operator, make in calls(subject, point):
            yield f"{operator.name}, {point}", partial(_like_the_fake, operator, make)
    seen: set[tuple[str, str]] = set()
    for point in points(subject, torch.float32, empty=False):
        for operator, make in calls(subject, point):
            for name, given in tensors(make()).items():
                if given.dim() > 1 and (operator.name, name) not in seen:
                    seen.add((operator.name, name))
                    where = f"{operator.name}, {point}, {name} alone transposed"
                    yield where, partial(_like_the_fake, operator, partial(_transposed, make, name))


def opcheck(subject: Subject) -> Iterator[Trial]:
    """torch.library.opcheck: schema, autograd registration, fakes, tracing with dynamic shapes."""

    def trial(operator: Operator, make: Callable[[], Inputs], differentiable: bool) -> str | None:
        given = make()
        if differentiable:
            for value in tensors(given).values():
                value.requires_grad_(floating(value))
        torch.library.opcheck(operator.overload, tuple(given.values()))
        return None

    for point in points(subject, torch.float32):
        for operator, make in calls(subject, point):
            with_gradient = operator.backward is not None
            yield f"{operator.name}, {point}", partial(trial, operator, make, with_gradient)


def calls(
    subject: Subject, point: Point, layout: str = "as it is"
) -> Iterator[tuple[Operator, Callable[[], Inputs]]]:
    """The operator of a case and the one of its gradients, each with what makes its inputs."""
    operator = subject.forward(point.case)
    yield operator, point.inputs

    def gradient_inputs() -> Inputs:
        made = point.inputs()
        given = cotangents(subject, operator, made, layout)
        found = backward_inputs(subject, operator, operator, made, given)
        # Those of the point's layout are laid out so already; saved outputs, and cotangents, not.
        lay = LAYOUTS[point.layout if not point.layout.startswith("expanded") else "as it is"]
        return {
            k: lay(v.detach()) if isinstance(v, Tensor) and k not in made else v
            for k, v in found.items()
        }

    if operator.backward is not None:
        yield subject.gradient(operator), gradient_inputs


def _run(subject: Subject, point: Point) -> dict[str, Tensor | None]:
    operator = subject.forward(point.case)
    made = point.inputs()
    given = cotangents(subject, operator, made, "as it is")
    return differentiated(subject, operator, operator, made, given)


def _by_reference(subject: Subject, point: Point) -> dict[str, Tensor | None]:
    """What `_run` gives of an operator that has no kernel, so that its references compute all."""
    operator, made = subject.forward(point.case), point.inputs()
    found: dict[str, Tensor | None] = dict(
        zip(operator.outputs, outputs(operator.reference, made), strict=True)
    )
    if operator.backward is not None:
        given = cotangents(subject, operator, made, "as it is")
        wanted = backward_inputs(subject, operator, operator.reference, made, given)
        gradient = subject.gradient(operator)
        named = dict(zip(gradient.outputs, outputs(gradient.reference, wanted), strict=True))
        found |= {
            f"grad/{name}": named["d" + name] for name in subject.spec.differentiable(operator)[0]
        }
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _untouched(operator: Operator, make: Callable[[], Inputs]) -> str | None:
    given = make()
    before = {name: t.clone() for name, t in tensors(given).items()}
    results = outputs(operator, given)
    for name, value in tensors(given).items():
        if not same_bits(value, before[name]):
            return f"{name} is changed by the call"
        for output, result in zip(operator.outputs, results, strict=True):
            own = result.numel() == 0 or not _overlap(result, value)
            if not own:
                return f"{output} shares memory with {name}"
    return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _longer(t: Tensor, dim: int) -> Tensor:
    return torch.cat([t, t.narrow(dim, 0, 1)], dim)


def _other_float(t: Tensor) -> Tensor:
    if not floating(t):
        return t.float()
    return t.to(torch.float64 if t.dtype != torch.float64 else torch.float32)


_FAULTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "another dtype": _other_float,
    "integers": lambda t: t.long(),
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t[0],
    "another first size": lambda t: _longer(t, 0),
    "another second size": lambda t: _longer(t, 1),
    "another last size": lambda t: _longer(t, -1),
    "another device": lambda t: t.to("meta"),
}


def _refused_alike(
    operator: Operator, make: Callable[[], Inputs], name: str, fault: str
) -> str | None:
    given = make()
    if given[name].dim() < (2 if "second" in fault else 1) and "one dimension more" not in fault:
        raise Refused("there is no such dimension")
    wrong = {**given, name: _FAULTS[fault](given[name])}
    if _kind(wrong[name]) == _kind(given[name]):
        raise Refused("it is no fault")
    if fault == "another device" and len(tensors(given)) == 1:
        raise Refused("there is no other tensor")
    said = {
        "the reference": _answer(operator.reference, wrong),
        "the fake": _under_fake(operator, wrong),
        "the kernel": _answer(operator, wrong),
    }
    first = said["the kernel"]
    for who, answer in said.items():
        if answer != first:
            return f"the kernel {_told(first)}; {who} {_told(answer)}"
    if first is None:
        return None  # one more form that the op takes
    kind, text = first
    if kind != "ValueError":
        return f"it is refused by {kind}, not by ValueError: {text}"
    if "\n" in text.strip() or operator.qualified_name not in text:
        return f"the refusal is not one line that names {operator.qualified_name}: {text}"
    return None


def _kind(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.device


def _told(answer: tuple[str, str] | None) -> str:
    return "takes it" if answer is None else f"says {answer[0]}: {answer[1]}"


def _answer(run: Callable[..., Any], given: Inputs) -> tuple[str, str] | None:
    try:
        run(*given.values())
    except Exception as error:  # that of another class is what the trial is after
        return type(error).__name__, str(error)
    return None


def _faked(mode: FakeTensorMode, given: Inputs) -> Inputs:
    return {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given.items()}


def _under_fake(operator: Operator, given: Inputs) -> tuple[str, str] | None:
    with FakeTensorMode() as mode:
        return _answer(operator, _faked(mode, given))


def _transposed(make: Callable[[], Inputs], name: str) -> Inputs:
    """The inputs, of which one lies transposed in memory, with its values."""
    given = make()
    return {**given, name: LAYOUTS["transposed"](given[name])}


def _like_the_fake(operator: Operator, make: Callable[[], Inputs]) -> str | None:
    given = make()
    real, plain = outputs(operator, given), outputs(operator.reference, given)
    with FakeTensorMode() as mode:
        faked = outputs(operator, _faked(mode, given))
    named = {"the kernel": real, "the reference": plain}
    for who, results in named.items():
        for name, found, expected in zip(operator.outputs, faked, results, strict=True):
            for what in ("shape", "dtype", "stride"):
                mine, theirs = _fact(found, what), _fact(expected, what)
                if mine != theirs:
                    return f"{name}: {what} {mine} in the fake, {theirs} from {who}"
    return None


def _fact(t: Tensor, what: str) -> Any:
    if what != "stride":
        return tuple(t.shape) if what == "shape" else t.dtype
    # Those of a dimension of size 1, or of nothing, are never used.
    return tuple(
        s if n > 1 and t.numel() else None for n, s in zip(t.shape, t.stride(), strict=True)
    )
