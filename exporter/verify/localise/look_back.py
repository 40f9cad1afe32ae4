"""The gradients of a forward program's values, in the order in which autograd comes to them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from fuseport.exporter.program import Program
from fuseport.exporter.program.provenance import layer
from fuseport.exporter.verify.compare import Expected, Judgement
from fuseport.exporter.verify.diagnosis import Divergence
from fuseport.exporter.verify.localise import parts
from fuseport.exporter.verify.localise.candidates import Graph, model_graph
from fuseport.exporter.verify.localise.look import Alone, dtype_of, judged
from fuseport.exporter.verify.localise.reference import measured
from fuseport.exporter.verify.localise.search import Found
from fuseport.exporter.verify.localise.trial import Trials
from fuseport.exporter.verify.localise.written import Written

__all__ = ["Backward"]

Tensors = Mapping[str, Tensor]


@dataclass
class Backward:
    """Autograd through a forward program, backwards; see `look.Look`.

    A value's gradient is computed from those of the values that it goes into. It is had as that of
    a zero which is added to the value.
    """

    program: Program
    candidate: Graph
    trials: Trials
    inputs: Tensors
    cotangents: Tensors
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find what can be looked at."""
        graph = [n for n in self.program.exported.graph.nodes if n.op != "output"]
        self.nodes: dict[str, fx.Node] = {node.name: node for node in graph}
        self.needs: Mapping[str, Sequence[str]] = {
            node.name: [user.name for user in node.users if user.op != "output"]
            for node in reversed(graph)
        }
        self._shapes = {
            name: shape
            for name, shape in parts.shapes(self.program, self.inputs).items()
            if self.candidate.names.get(name) == name and _floats(self.nodes[name])
        }
        self.sizes = {
            name: self.nodes[name].meta["val"].dtype.itemsize * math.prod(shape)
            for name, shape in self._shapes.items()
        }

    def wrong(self, names: Sequence[str]) -> set[str]:
        """As `Look` says."""
        if any(name not in self.judgements for name in names):
            known = self._reference(names)
            found = self._gradients(names)
            for name in names:
                if name in known:
                    self.judgements[name] = judged(
                        name, found.get(name), known[name], backward=True
                    )
                else:  # it has no gradient in the model
                    self.judgements[name] = Judgement("pass")
        return {name for name in names if self.judgements[name].verdict == "fail"}

    def alone(self, found: Found) -> Alone:
        """As `Look` says."""
        compute, entries = self._cut(found)
        values = self._values(entries)
        seeds = self._reference(found.right)
        outputs = [name for name in found.right if name in seeds]
        program = parts.cut(self.program, compute, entries, outputs)
        cotangents = {n: seeds[n][0].to(dtype_of(seeds[n][1])) for n in outputs}
        inputs = {parts.ENTRY + name: tensor for name, tensor in values.items()}
        name = f"grad/{parts.ENTRY}{found.value}"
        known = measured(program, inputs, [name], cotangents)[name]
        between, more = parts.between(self.candidate.program, outputs, entries)
        own = parts.cut(self.candidate.program, between, [*entries, *more], outputs)
        given = inputs | {parts.ENTRY + n: tensor for n, tensor in self._values(more).items()}
        file = self.candidate.differentiable(own, self.trials.fresh())
        runtime = self.candidate.runtime
        gradients = self.trials.differentiated(runtime, file, own, given, cotangents)
        judgement = judged(found.value, gradients.get(name), known, backward=True)
        written = Written(file, {n: parts.ENTRY + n for n in entries}, {found.value: name})
        within = None
        if judgement.verdict != "fail" and not found.vanished:
            within = self._within(found, program, inputs, outputs)
        operators = frozenset(parts.called(self.nodes[name]) for name in compute)
        return Alone(
            judgement, within, written, values, cotangents, known, name, operators, runtime
        )

    def _within(
        self, found: Found, program: Program, inputs: Tensors, outputs: Sequence[str]
    ) -> Judgement | None:
        """The gradient in the whole program, against what the gradients there should give."""
        if found.value not in self.sizes:
            return None
        there = self._gradients([*outputs, found.value])
        name = f"grad/{parts.ENTRY}{found.value}"
        seeds = {n: there[n] for n in outputs if n in there}
        known = measured(program, inputs, [name], seeds).get(name)
        if known is None:
            return None
        return judged(found.value, there.get(found.value), known, backward=True)

    def divergence(self, found: Found) -> Divergence:
        """As `Look` says."""
        suspects = [n for n in self.nodes[found.value].users if n.name in self.needs]
        node = suspects[0] if suspects else self.nodes[found.value]
        judgement = self.judgements.get(found.value)
        return Divergence(
            tensor=found.value,
            op=parts.called(node),
            module=layer(node),
            direction="backward",
            max_abs_error=None if judgement is None else judgement.max_abs_error,
            bound=None if judgement is None else judgement.bound,
        )

    def by_torch(self) -> "Backward":
        """As `Look` says."""
        return replace(self, candidate=model_graph(self.program), judgements={})

    def _cut(self, found: Found) -> tuple[list[str], list[str]]:
        """The operators that the value goes into, up to those whose gradients are right."""
        within = {*found.within, *found.right} - {found.value}
        waiting = list(within)
        entries: dict[str, None] = {found.value: None}
        while waiting:
            for node in self.nodes[waiting.pop()].all_input_nodes:
                if node.name in within:
                    if node.name in found.right:
                        entries[node.name] = None  # its gradient has what goes on from it
                elif isinstance(node.meta.get("val"), Tensor):
                    entries[node.name] = None
                elif node.name not in within:  # a size, or one of several results
                    within.add(node.name)
                    waiting.append(node.name)
        order = [name for name in self.nodes if name in within]
        return order, list(entries)

    def _values(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Reference values of nodes, inputs and parameters, in the working dtype."""
        tensors = {**self.program.state(requires_grad=False), **self.inputs}
        given = {
            node: tensors[name].detach()
            for name, node in parts.node_of(self.program).items()
            if name in tensors
        }
        computed = [name for name in names if name not in given]
        known = measured(parts.with_outputs(self.program, computed), self.inputs, computed)
        return {
            name: given[name] if name in given else known[name][0].to(dtype_of(known[name][1]))
            for name in names
        }

    def _reference(self, names: Sequence[str]) -> dict[str, tuple[Tensor, Expected]]:
        program = parts.with_entries(self.program, names)
        wanted = [f"grad/{parts.ENTRY}{name}" for name in names]
        found = measured(program, self._with_zeros(names), wanted, self.cotangents)
        return {name.removeprefix(f"grad/{parts.ENTRY}"): known for name, known in found.items()}

    def whole(self, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """What the candidate gives: outputs, gradients, and those of values under `parts.ENTRY`."""
        program = parts.with_entries(self.candidate.program, names)
        file = self.candidate.differentiable(program, self.trials.fresh())
        inputs = self._with_zeros(names)
        runtime = self.candidate.runtime
        return self.trials.differentiated(runtime, file, program, inputs, self.cotangents)

    def _gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = self.whole(names)
        begin = f"grad/{parts.ENTRY}"
        return {n.removeprefix(begin): t for n, t in found.items() if n.startswith(begin)}

    def _with_zeros(self, names: Sequence[str]) -> dict[str, Tensor]:
        zeros = {
            parts.ENTRY + name: torch.zeros(
                self._shapes[name], dtype=self.nodes[name].meta["val"].dtype
            )
            for name in names
        }
        return {**self.inputs, **zeros}


def _floats(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())
