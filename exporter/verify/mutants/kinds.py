"""What the catalogue is made of: kinds of planted bugs, and the places that they are planted in.

A kind is a mistake in words and a way to make it anywhere; a mutant is one kind in one place. What
a kind is derived from is an operator with what its cases give it (`Seen`), so that ops of a user's
own get their mutants as those of fuseport do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fuseport.exporter.verify.op_check.subject import Subject, floating, points
from fuseport.ops.spec import Inputs, Operator, OpSpec, Outputs, Run, as_tuple

__all__ = ["Change", "Kind", "Mutant", "Place", "Seen", "Where", "seen"]

Where = Literal["forward", "gradient", "fake", "lowering", "artifact"]

Change = Callable[[Run, Inputs], Outputs]
"""What takes the place of an operator: it is given the right computation, and its inputs."""


@dataclass(frozen=True)
class Seen:
    """An operator, and what its cases show of it.

    Attributes:
        spec: of the op.
        operator: of it; that of a case, or the one of its gradients.
        is_gradient: which of the two.
        examples: inputs and outputs of each case, as tensors without memory.
    """

    spec: OpSpec
    operator: Operator
    is_gradient: bool
    examples: tuple[tuple[Inputs, Outputs], ...]

    @cached_property
    def floating_inputs(self) -> tuple[str, ...]:
        """Inputs that are floating tensors, of more than nothing in some case."""
        return self._of(0, lambda t: floating(t) and t.numel() > 0)

    @cached_property
    def floating_outputs(self) -> tuple[str, ...]:
        """Outputs likewise."""
        return self._of(1, lambda t: floating(t) and t.numel() > 0)

    def outputs_where(self, holds: Callable[[Tensor], bool]) -> tuple[str, ...]:
        """Floating outputs that are so in some case."""
        return self._of(1, lambda t: floating(t) and t.numel() > 0 and holds(t))

    def inputs_where(self, holds: Callable[[Tensor], bool]) -> tuple[str, ...]:
        """Floating inputs that are so in some case."""
        return self._of(0, lambda t: floating(t) and t.numel() > 0 and holds(t))

    def _of(self, which: Literal[0, 1], holds: Callable[[Tensor], bool]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for example in self.examples:
            for name, value in example[which].items():
                if isinstance(value, Tensor) and holds(value):
                    found[name] = None
        order = self.operator.outputs if which else self.operator.inputs
        return tuple(name for name in order if name in found)


Place = tuple[str, Change]
"""Where in an operator, in words, and the change."""


@dataclass(frozen=True)
class Kind:
    """A kind of mistake.

    Attributes:
        name: in reports.
        description: what is wrong, in words.
        where: what is changed.
        checks: of ops, those that are there to see it, and are made first.
        places: where in an operator it can be planted; for kinds of lowerings and artifacts, other
            functions find the places.
        source: published code that made the mistake.
        key: the dispatch key whose kernel is changed, as it is for the CPU.
    """

    name: str
    description: str
    where: Where
    checks: tuple[str, ...] = ()
    places: Callable[[Seen], Iterator[Place]] | None = None
    source: str = ""
    key: str = "CPU"


@dataclass(frozen=True)
class Mutant:
    """One kind in one place of an op.

    Attributes:
        op: its name.
        kind: of the catalogue.
        operator: the name of the operator changed; of a lowering's, of the function.
        place: in words.
        change: of the operator; None where the change is of another sort.
    """

    op: str
    kind: Kind
    operator: str
    place: str
    change: Change | None = None

    @property
    def label(self) -> str:
        """`<kind>: <operator>: <place>`: as `OpSpec.no_bugs` names it."""
        return f"{self.kind.name}: {self.operator}: {self.place}"


def seen(spec: OpSpec, seed: int = 0) -> tuple[Seen, ...]:
    """What the cases show of each operator of an op, in the order in which it declares them."""
    subject = Subject(spec, spec.cases, seed)
    found: dict[str, list[tuple[Inputs, Outputs]]] = {}
    gradients: set[str] = set()
    for point in points(subject, torch.float32, layouts=True):
        operator = subject.forward(point.case)
        given = point.inputs()
        try:
            made = as_tuple(operator.fake(*given.values()))
        except ValueError:
            continue  # a layout of ours that the op refuses
        results = dict(zip(operator.outputs, made, strict=True))
        found.setdefault(operator.name, []).append((_bare(given), _bare(results)))
        if operator.backward is None:
            continue
        gradient = subject.gradient(operator)
        gradients.add(gradient.name)
        cotangents = {f"d{n}": t for n, t in results.items()}
        known = {**given, **results, **cotangents}
        wanted = {n: known[n] for n in gradient.inputs}
        made = as_tuple(gradient.fake(*wanted.values()))
        outcome = dict(zip(gradient.outputs, made, strict=True))
        found.setdefault(gradient.name, []).append((_bare(wanted), _bare(outcome)))
    return tuple(
        Seen(spec, operator, operator.name in gradients, tuple(found[operator.name]))
        for operator in spec.operators
        if operator.name in found
    )


def _bare(values: Inputs) -> Inputs:
    """The same tensors as shapes, dtypes and strides alone."""
    return {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        if isinstance(t, Tensor)
        else t
        for name, t in values.items()
    }
