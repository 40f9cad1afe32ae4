"""What checks are made on: an op's cases, in every dtype and in memory layouts of our own."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.ops.spec import Case, Inputs, Operator, OpSpec, as_tuple

__all__ = [
    "LAYOUTS",
    "SMALL",
    "Check",
    "Layout",
    "Point",
    "Refused",
    "Subject",
    "Trial",
    "Unsupported",
    "backward_inputs",
    "contiguous",
    "cotangents",
    "differentiated",
    "floating",
    "outputs",
    "points",
    "same_bits",
    "sample",
    "size",
    "tensors",
    "unlike",
    "wide",
    "widened",
]

SMALL = 2_000
"""Elements of inputs that are differentiated by differences, two evaluations for each."""

Run = Callable[..., "Tensor | tuple[Tensor, ...]"]
Layout = Callable[[Tensor], Tensor]


class Unsupported(Exception):
    """A check does not apply to an op, or needs what this machine lacks; the message says which."""


class Refused(Exception):
    """Raised within a trial that there is nothing to try: it does not count."""


@dataclass(frozen=True)
class Subject:
    """An op under check.

    Attributes:
        spec: of the op; its operators are registered.
        cases: of the op, or a sample of them.
        seed: of all values.
    """

    spec: OpSpec
    cases: tuple[Case, ...]
    seed: int

    def forward(self, case: Case) -> Operator:
        """The operator that a case calls."""
        return self.spec.operator(case.operator)

    def gradient(self, operator: Operator) -> Operator:
        """The operator that computes the gradients of `operator`, which has one."""
        assert operator.backward is not None
        return self.spec.operator(operator.backward)

    @property
    def with_gradient(self) -> bool:
        """Whether a case calls an operator that has a backward."""
        return any(self.forward(case).backward for case in self.cases)


Trial = tuple[str, Callable[[], str | None]]
"""The case that is tried, in words, and the trial itself: what is wrong, or None."""

Check = Callable[[Subject], Iterator[Trial]]


@dataclass(frozen=True)
class Point:
    """A case in a dtype and in one of the layouts here."""

    case: Case
    dtype: torch.dtype
    seed: int
    layout: str = "as it is"

    def inputs(self) -> Inputs:
        """The inputs, made anew."""
        made = self.case.make(self.dtype, self.seed)
        lay = LAYOUTS[self.layout]
        return {k: lay(v) if isinstance(v, Tensor) else v for k, v in made.items()}

    def __str__(self) -> str:
        layout = "" if self.layout == "as it is" else f", {self.layout}"
        return f"{self.case.name}, {str(self.dtype).removeprefix('torch.')}{layout}"


def points(
    subject: Subject, *dtypes: torch.dtype, layouts: bool = False, empty: bool = True
) -> Iterator[Point]:
    """The cases in these dtypes, or in all; with `layouts` each in one of ours too, and in one
    dtype then: they take turns.

    Args:
        subject: whose cases they are.
        dtypes: of those that a case has; the case's first where it has none of them.
        layouts: whether to move inputs about in memory.
        empty: whether there are cases of no elements among them.
    """
    others = [name for name in LAYOUTS if name != "as it is"]
    for index, case in enumerate(subject.cases):
        chosen = [d for d in case.dtypes if d in dtypes or not dtypes] or [case.dtypes[0]]
        for dtype in chosen:
            point = Point(case, dtype, subject.seed)
            if empty or all(t.numel() for t in tensors(point.inputs()).values()):
                yield point
                if layouts and dtype == chosen[index % len(chosen)]:
                    yield Point(case, dtype, subject.seed, others[index % len(others)])


def sample(cases: Sequence[Case], count: int | None, seed: int) -> tuple[Case, ...]:
    """So many of the cases of each operator, drawn with the seed; all for None.

    One of them is of a size that every check takes, if the operator has such a case.
    """
    if count is None:
        return tuple(cases)
    draw = random.Random(seed)
    chosen: set[str] = set()
    for operator in dict.fromkeys(case.operator for case in cases):
        own = [case for case in cases if case.operator == operator]
        small = [case for case in own if _is_small(case)]
        first = draw.sample(small, 1) if small else []
        others = [case for case in own if case not in first]
        count_others = min(count - len(first), len(others))
        chosen |= {case.name for case in (*first, *draw.sample(others, count_others))}
    return tuple(case for case in cases if case.name in chosen)


def _is_small(case: Case) -> bool:
    if torch.float64 not in case.dtypes:
        return False
    try:
        sizes = [t.numel() for t in tensors(case.make(torch.float64, 0)).values()]
    except Exception:  # of a user's op: the checks say so
        return False
    return all(sizes) and sum(sizes) <= SMALL


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Those inputs that are tensors."""
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def floating(t: Tensor) -> bool:
    """Whether a tensor can have a gradient, by its dtype."""
    return t.is_floating_point() or t.is_complex()


def size(point: Point) -> int:
    """How many elements the inputs have."""
    return sum(t.numel() for t in tensors(point.inputs()).values())


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for a floating dtype, complex128 for a complex one; others as they are."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float64)
    return dtype


def contiguous(inputs: Inputs) -> Inputs:
    """Copies whose memory is laid out plainly."""
    return {
        k: v.detach().clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else v
        for k, v in inputs.items()
    }


def widened(inputs: Inputs) -> Inputs:
    """Plain copies in float64."""
    return {
        k: v.to(wide(v.dtype)) if isinstance(v, Tensor) else v
        for k, v in contiguous(inputs).items()
    }


def outputs(run: Run, inputs: Inputs) -> tuple[Tensor, ...]:
    """What an operator, or its reference, returns; a single tensor as a tuple of one."""
    return as_tuple(run(*inputs.values()))


def cotangents(subject: Subject, operator: Operator, inputs: Inputs, layout: str) -> Inputs:
    """Random ones of the operator's differentiable outputs, `d<output>`, in a memory layout."""
    generator = torch.Generator().manual_seed(subject.seed + 1)
    _, takes = subject.spec.differentiable(operator)
    found: Inputs = {}
    for name, value in zip(operator.outputs, outputs(operator.reference, inputs), strict=True):
        if name in takes:
            drawn = torch.randn(value.shape, generator=generator, dtype=wide(value.dtype))
            found["d" + name] = LAYOUTS[layout](drawn.to(value.dtype))
    return found


def backward_inputs(
    subject: Subject, operator: Operator, run: Run, inputs: Inputs, given: Inputs
) -> Inputs:
    """The inputs of the operator's gradient; saved outputs are those of `run`, on `inputs`."""
    with torch.no_grad():
        saved = zip(operator.outputs, outputs(run, inputs), strict=True)
    known = {**inputs, **dict(saved), **given}
    return {name: known[name] for name in subject.gradient(operator).inputs}


def differentiated(
    subject: Subject, operator: Operator, run: Run, inputs: Inputs, given: Inputs
) -> dict[str, Tensor | None]:
    """The outputs by name, and `grad/<input>` by autograd: None where there is none.

    Args:
        subject: under check.
        operator: whose names they are.
        run: the operator itself, or its reference.
        inputs: of which each floating one is differentiated.
        given: the cotangents, `d<output>`; those of other outputs are none.
    """
    leaves = {
        name: value.detach().requires_grad_()
        if isinstance(value, Tensor) and floating(value)
        else value
        for name, value in inputs.items()
    }
    results = dict(zip(operator.outputs, outputs(run, leaves), strict=True))
    found: dict[str, Tensor | None] = {name: value.detach() for name, value in results.items()}
    wanted = {name: t for name, t in tensors(leaves).items() if t.requires_grad}
    reached = [n for n, y in results.items() if "d" + n in given and y.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if reached:
        gradients = torch.autograd.grad(
            [results[name] for name in reached],
            list(wanted.values()),
            [given["d" + name] for name in reached],
            allow_unused=True,
        )
    found.update({f"grad/{n}": g for n, g in zip(wanted, gradients, strict=True)})
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, whatever their strides."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    plain = torch.contiguous_format  # in `contiguous`, a dimension of size 1 keeps any stride
    first, second = (t.detach().clone(memory_format=plain).reshape(-1) for t in (one, other))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def unlike(one: dict[str, Tensor | None], other: dict[str, Tensor | None], what: str) -> str | None:
    """Which tensor differs in its bits between two runs; None if none does."""
    for name, value in one.items():
        against = other[name]
        if (value is None) != (against is None):
            return f"{name} is there or not {what}"
        if value is not None and against is not None and not same_bits(value, against):
            return f"{name} has other bits {what}"
    return None


def _sliced(t: Tensor) -> Tensor:
    """Every second element of the last dimension of a larger buffer."""
    if t.dim() == 0:
        return t
    buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), _filling(t))
    return buffer[..., 1::2].copy_(t)


def _offset(t: Tensor) -> Tensor:
    """Rows within a buffer that begins before them and ends after them."""
    if t.dim() == 0:
        return t
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 3), _filling(t))
    return buffer[..., 1:-2].copy_(t)


def _transposed(t: Tensor) -> Tensor:
    """The last two dimensions trade places in memory."""
    return t.mT.contiguous().mT if t.dim() > 1 else t


def _rolled(t: Tensor) -> Tensor:
    """The first dimension is the last in memory."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t


def _expanded(t: Tensor) -> Tensor:
    """The first entry for all: stride 0."""
    return t[:1].expand(t.shape) if t.dim() and len(t) > 1 else t


def _expanded_last(t: Tensor) -> Tensor:
    """The first element of each row for all of it: stride 0."""
    return t[..., :1].expand(t.shape) if t.dim() and t.shape[-1] > 1 else t


def _filling(t: Tensor) -> float:
    return float("nan") if floating(t) else 0


LAYOUTS: dict[str, Layout] = {
    "as it is": lambda t: t,
    "transposed": _transposed,
    "sliced": _sliced,
    "expanded": _expanded,
    "offset": _offset,
    "rolled": _rolled,
    "expanded rows": _expanded_last,
}
"""Memory layouts by name; but for the expanded ones, the values stay."""
