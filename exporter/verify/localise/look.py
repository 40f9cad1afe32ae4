"""How a search sees one failing artifact: which values there are, and which of them are wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, fx

from fuseport.exporter.program import Program
from fuseport.exporter.program.provenance import layer
from fuseport.exporter.verify.compare import Expected, Judgement, judge
from fuseport.exporter.verify.diagnosis import Divergence
from fuseport.exporter.verify.localise import parts
from fuseport.exporter.verify.localise.candidates import Candidate, model_graph
from fuseport.exporter.verify.localise.reference import Measured, measured
from fuseport.exporter.verify.localise.search import Found
from fuseport.exporter.verify.localise.trial import Trials, UnknownError
from fuseport.exporter.verify.localise.written import Written
from fuseport.ops import OPS, ort

__all__ = ["Alone", "Forward", "Look", "dtype_of", "judged"]

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Alone:
    """What came of running the suspects by themselves, on reference inputs.

    Attributes:
        judgement: of the value.
        within: of the value in the whole program, against what its inputs there should give.
        written: the file that was run.
        inputs: by node.
        cotangents: by node; None where no gradient was asked for.
        truth: of the value, and what else is known of it.
        name: of the value among what the file gives.
        operators: that are in it.
        runtime: that ran it.
    """

    judgement: Judgement
    within: Judgement | None
    written: Written
    inputs: Tensors
    cotangents: Tensors | None
    truth: tuple[Tensor, Expected]
    name: str
    operators: frozenset[str]
    runtime: str

    @property
    def wrong(self) -> bool:
        """Whether the fault is here."""
        return self.judgement.verdict == "fail" or (
            self.within is not None and self.within.verdict == "fail"
        )


class Look(Protocol):
    """One direction of a search.

    Attributes:
        needs: of `search.first_wrong`.
        sizes: of the same.
    """

    needs: Mapping[str, Sequence[str]]
    sizes: dict[str, int]

    @property
    def candidate(self) -> Candidate:
        """What is looked into."""

    def wrong(self, names: Sequence[str]) -> set[str]:
        """The wrong ones of these values."""

    def alone(self, found: Found) -> Alone:
        """What the suspects of a search give by themselves."""

    def divergence(self, found: Found) -> Divergence:
        """What a report says of it."""

    def by_torch(self) -> "Look":
        """The same, of the model's own graph, run by torch's kernels."""


def judged(
    name: str, value: Tensor | None, known: tuple[Tensor, Expected], *, backward: bool
) -> Judgement:
    """A value of a graph against its truth; a view of the right elements has another shape."""
    truth, expected = known
    if value is not None:
        if value.shape != truth.shape and value.numel() == truth.numel():
            value = value.reshape(truth.shape)
        # A value inside may be of another type: what counts is what that does to it.
        value = value.to(dtype_of(expected))
    return judge(f"grad/{name}" if backward else name, value, truth, expected, None)


def _bytes(program: Program, inputs: Tensors) -> dict[str, int]:
    """Bytes of each tensor that a call computes from its inputs."""
    nodes = {node.name: node for node in program.exported.graph.nodes}
    return {
        name: math.prod(shape) * nodes[name].meta["val"].dtype.itemsize
        for name, shape in parts.shapes(program, inputs).items()
    }


@dataclass
class Forward:
    """A program's values in the order in which it computes them; see `Look`.

    That is the whole of a gradient program, whose second half is the backward.
    """

    program: Program
    candidate: Candidate
    trials: Trials
    inputs: Tensors
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find what can be looked at."""
        graph = self.program.exported.graph
        self.nodes: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
        self.needs: Mapping[str, Sequence[str]] = parts.needs(self.program)
        every = _bytes(self.program, self.inputs)
        self.sizes = {n: size for n, size in every.items() if n in self.candidate.visible}
        self._backward = _from_cotangents(self.program)

    def wrong(self, names: Sequence[str]) -> set[str]:
        """As `Look` says."""
        if any(name not in self.judgements for name in names):
            known = measured(parts.with_outputs(self.program, names), self.inputs, names)
            found = self._values(names)
            for name in names:
                self.judgements[name] = self._judged(name, found.get(name), known)
        return {name for name in names if self.judgements[name].verdict == "fail"}

    def alone(self, found: Found) -> Alone:
        """As `Look` says."""
        if found.value not in self.candidate.visible:
            raise UnknownError(f"the artifact has no value that could be told to be {found.value}")
        entries, inputs = self._given(found)
        program = parts.cut(self.program, found.within, entries, [found.value])
        written = self.candidate.part(entries, found.value, self.trials.fresh())
        known = _of(program, inputs, found.value)
        # A file may take sizes from inputs where the graph takes them from another value.
        inputs = {**self._by_node(), **inputs}
        operators = frozenset(parts.called(self.nodes[name]) for name in found.within)
        runtime = _plain(self.candidate.runtime, operators, self.trials.device)
        results = self.trials.part(runtime, written, inputs)
        judgement = self._judged(found.value, results[found.value], {found.value: known})
        within = None
        if judgement.verdict != "fail" and not found.vanished:
            within = self._within(found, entries, program, inputs)
        value = found.value
        return Alone(judgement, within, written, inputs, None, known, value, operators, runtime)

    def _within(
        self, found: Found, entries: Sequence[str], program: Program, inputs: Tensors
    ) -> Judgement | None:
        """The value in the whole program, against what its inputs there should give."""
        seen = [name for name in entries if name in self.sizes]
        if found.value not in self.sizes:
            return None
        there = self._values([*seen, found.value])
        taken = {n: there[n].reshape(t.shape) if n in seen else t for n, t in inputs.items()}
        taken = {name: t.to(inputs[name].dtype) for name, t in taken.items()}
        known = _of(program, taken, found.value)
        return self._judged(found.value, there[found.value], {found.value: known})

    def divergence(self, found: Found) -> Divergence:
        """As `Look` says."""
        node = self.nodes[found.value]
        judgement = self.judgements.get(found.value)
        return Divergence(
            tensor=found.value,
            op=parts.called(node),
            module=layer(node),
            direction="backward" if found.value in self._backward else "forward",
            max_abs_error=None if judgement is None else judgement.max_abs_error,
            bound=None if judgement is None else judgement.bound,
        )

    def by_torch(self) -> "Forward":
        """As `Look` says."""
        return replace(self, candidate=model_graph(self.program), judgements={})

    def _given(self, found: Found) -> tuple[list[str], dict[str, Tensor]]:
        """What the suspects are computed from, with reference values in the working dtype."""
        users = self._by_node()
        entries = [*found.right, *(name for name in found.within if name in users)]
        known = measured(parts.with_outputs(self.program, found.right), self.inputs, found.right)
        return entries, {
            name: users[name] if name in users else known[name][0].to(dtype_of(known[name][1]))
            for name in entries
        }

    def _by_node(self) -> dict[str, Tensor]:
        nodes = self.program.exported.graph_signature.user_inputs
        pairs = zip(self.program.inputs, nodes, strict=True)
        return {str(node): self.inputs[spec.name] for spec, node in pairs}

    def _values(self, names: Sequence[str]) -> dict[str, Tensor]:
        written = self.candidate.whole(names, self.trials.fresh())
        return self.trials.whole(self.candidate.runtime, self.program.kind, written)

    def _judged(self, name: str, value: Tensor | None, known: Measured) -> Judgement:
        if name not in known:
            return Judgement("pass", "it does not exist")
        return judged(name, value, known[name], backward=name in self._backward)


def _plain(runtime: str, operators: frozenset[str], device: str) -> str:
    """The runtime for some operators alone: one with kernels more refuses what has no use for them,
    since it would say of itself what is true of the plain one."""
    base, _, more = runtime.partition("+")
    specs = [spec for spec in OPS.values() if ort.bound(spec, device)]
    bound = {operator.qualified_name for spec in specs for operator in spec.operators}
    return base if more == "fused" and bound.isdisjoint(operators) else runtime


def _of(program: Program, inputs: Tensors, name: str) -> tuple[Tensor, Expected]:
    given = {spec.name: inputs[spec.name.removeprefix(parts.ENTRY)] for spec in program.inputs}
    return measured(program, given, [name])[name]


def dtype_of(expected: Expected) -> torch.dtype:
    """The working dtype of a value."""
    found = getattr(torch, expected.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _from_cotangents(program: Program) -> set[str]:
    """The nodes of the backward: what cotangents enter."""
    signature = program.exported.graph_signature
    inputs = zip(program.inputs, signature.user_inputs, strict=True)
    found = {str(node) for spec, node in inputs if spec.name.startswith("cotangent_")}
    for node in program.exported.graph.nodes:
        if any(needed.name in found for needed in node.all_input_nodes):
            found.add(node.name)
    return found
