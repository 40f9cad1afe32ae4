"""Loops until a value is reached, in terms of what has the right gradient.

Torch's own of a `while_loop` goes through one turn where there was none, loses what turns leave to
one another where the first state has no gradient, and stacks what formats have no form of. In a
gradient program such a loop tells how many turns there are, and a `scan` has that many, and one
more, which changes nothing: a `scan` has one turn at the least.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.loops._first_states import chosen_beside
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import SCAN, WHILE, added, graphs
from fuseport.exporter.program.sizes.of_graph import Sizes

__all__ = ["below_autograd", "carrying", "counted", "differentiable"]

aten = torch.ops.aten


def below_autograd(condition: Any, body: Any, carried: Any, others: Any) -> Any:
    """A `while_loop` that has no gradient, of what needs none."""
    with torch._C._AutoDispatchBelowAutograd():
        return WHILE(condition, body, carried, others)


def differentiable(exported: ExportedProgram) -> ExportedProgram:
    """A forward program of whose loops until a value is reached torch's own gradient is right: the
    one given, if it has none.

    Args:
        exported: stays as it is.
    """
    return _changed(exported, _Loop.be_differentiable)


def counted(exported: ExportedProgram) -> ExportedProgram:
    """A program with loops that count, and a `scan` of as many turns, in the place of loops until a
    value is reached: the one given, if it has none.

    Args:
        exported: stays as it is.

    Raises:
        ExportFailed: a loop leaves an integer that is no tensor.
    """
    return _changed(exported, _Loop.be_counted)


def carrying(exported: ExportedProgram) -> ExportedProgram:
    """A program whose loops until a value is reached carry whether they go on: the one given, if it
    has none. What that asks of the first states is computed before the loop.

    Args:
        exported: stays as it is.
    """
    return _changed(exported, _Loop.be_carrying)


def _changed(exported: ExportedProgram, change: Callable[["_Loop"], Any]) -> ExportedProgram:
    if not any(_loops(part) for part in graphs(exported.graph_module)):
        return exported
    module = copy.deepcopy(exported.graph_module)
    mode = mode_of(module.graph)
    for part in [*graphs(module)][::-1]:  # those inside first
        for loop in _loops(part):
            change(_Loop(part, mode, loop))
        part.graph.lint()
        part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _loops(part: fx.GraphModule) -> list[fx.Node]:
    found: list[fx.Node] = part.graph.find_nodes(op="call_function", target=WHILE)
    return found


class _Loop:
    """A loop until a value is reached, in a graph where others take its place.

    Attributes:
        is_of_tensors: whether all that turns leave are; torch takes integers, too.
    """

    def __init__(self, part: fx.GraphModule, mode: Any, loop: fx.Node) -> None:
        self._part, self._mode, self._loop = part, mode, loop
        self._sizes = Sizes(part.graph, mode)
        arguments: Any = loop.args
        condition, body, carried, others = arguments
        self._condition, self._body = (getattr(part, graph.target) for graph in (condition, body))
        self._carried: tuple[Any, ...] = tuple(carried)
        self._others: tuple[Any, ...] = tuple(others)
        tensors = filter(lambda x: isinstance(x, Tensor), map(_value, self._carried))
        self._device = next((x.device for x in tensors), None)
        self.is_of_tensors = all(isinstance(_value(state), Tensor) for state in self._carried)

    def be_differentiable(self) -> None:
        """Have all states a gradient, and what is left after no turn be the first ones."""
        if not self.is_of_tensors:
            return
        given = (*self._carried, *self._others)
        states = chosen_beside(self._sizes, self._loop, self._carried, given)
        turns = self._counting(states, self._others)
        any_ = self._call(aten.gt.Scalar, self._call(operator.getitem, turns, 0), 0)
        for left in [*self._loop.users]:
            at: Any = left.args[1]
            last = self._call(operator.getitem, turns, at + 1)
            left.replace_all_uses_with(self._call(aten.where.self, any_, last, self._carried[at]))
            self._loop.graph.erase_node(left)
        self._be_gone()

    def be_counted(self) -> None:
        """Be a loop that counts, and a `scan`."""
        if not self.is_of_tensors:
            raise ExportFailed(
                "there is no gradient through torch.while_loop of integers: have it carry tensors, "
                "or export outputs alone: --program forward"
            )
        turns = self._counting(map(self._held, self._carried), map(self._held, self._others))
        count = self._call(operator.getitem, turns, 0)
        with self._mode.shape_env.ignore_fresh_unbacked_symbols():
            size = self._call(aten.item.default, count)  # another one where this is traced
        self._call(aten.sym_constrain_range_for_size.default, size)
        numbers = self._call(
            aten.arange.default, self._call(operator.add, size, 1), device=self._device
        )
        # Torch takes a tensor that is given twice for one and the same in each turn.
        states, first = (
            [self._call(aten.clone.default, state) for state in self._carried] for _ in range(2)
        )
        given = (states, [numbers], (count, *first, *self._others))
        self._loop.replace_all_uses_with(
            self._region(SCAN, (self._turn(), *given), self._loop.meta["val"])
        )
        self._be_gone()

    def be_carrying(self) -> None:
        """Carry whether it goes on, which a turn computes last."""
        part, loop = self._part, self._loop
        (first,) = _inlined(part, loop, self._condition, [*self._carried, *self._others])
        condition, body = copy.deepcopy(self._condition), copy.deepcopy(self._body)
        output = body.graph.output_node()
        left: Any = output.args[0]
        others = body.graph.find_nodes(op="placeholder")[len(self._carried) :]
        (on,) = _inlined(body, output, self._condition, [*left, *others])
        output.args = ((on, *left),)
        for graph in (body.graph, condition.graph):
            self._place_first(graph, "on", torch.bool)
        graph = condition.graph
        told = self._within(graph)(aten.clone.default, _first(graph))
        graph.output_node().args = (told,)
        for node in [*graph.nodes][::-1]:
            if node.op not in ("placeholder", "output") and node is not told:
                graph.erase_node(node)
        for each in (body, condition):
            each.graph.lint()
            each.recompile()
        given = ((first, *self._carried), self._others)
        values = (_value(first), *loop.meta["val"])
        made = self._region(WHILE, (condition, body, *given), values)
        for taken in [*loop.users]:
            at: Any = taken.args[1]
            taken.args = (made, at + 1)
        self._be_gone()

    def _be_gone(self) -> None:
        graph, inside = self._loop.graph, self._loop.args[:2]
        graph.erase_node(self._loop)
        for each in inside:
            if isinstance(each, fx.Node) and not each.users:
                graph.erase_node(each)

    def _counting(self, states: Iterable[Any], others: Iterable[Any]) -> fx.Node:
        """The loop over other states, of which the first is how many turns there were."""
        none = self._call(aten.full.default, [], 0, dtype=torch.int64, device=self._device)
        inside = [self._beside_a_number(graph) for graph in (self._condition, self._body)]
        given = ((none, *states), tuple(others))
        return self._region(WHILE, (*inside, *given), (_value(none), *self._loop.meta["val"]))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._sizes.call(self._loop, target, *args, **kwargs)
        within(made, self._loop)
        return made

    def _held(self, node: Any) -> Any:
        """What has its value, and no gradient."""
        return self._call(aten.detach.default, node) if isinstance(_value(node), Tensor) else node

    def _region(self, target: Any, args: tuple[Any, ...], value: tuple[Any, ...]) -> fx.Node:
        """A call of graphs, which give such values."""
        inside = {id(each): self._inside(each) for each in args if isinstance(each, fx.GraphModule)}
        with self._loop.graph.inserting_before(self._loop):
            made = self._loop.graph.call_function(
                target, tuple(inside.get(id(each), each) for each in args)
            )
        made.meta["val"] = value
        within(made, self._loop)
        return made

    def _inside(self, module: fx.GraphModule) -> fx.Node:
        name = added(self._part, module, "until")
        with self._loop.graph.inserting_before(self._loop):
            return self._loop.graph.get_attr(name)

    def _beside_a_number(self, module: fx.GraphModule) -> fx.GraphModule:
        """A graph that is given a number before all else, and gives one more beside states."""
        changed = copy.deepcopy(module)
        graph: fx.Graph = changed.graph
        output = graph.output_node()
        number = self._place_first(graph, "turn", torch.int64)
        left: Any = output.args[0]
        if module is self._body:
            more = self._within(graph)(aten.add.Tensor, number, 1)
            output.args = ((more, *left),)
        changed.recompile()
        return changed

    def _place_first(self, graph: fx.Graph, name: str, dtype: torch.dtype) -> fx.Node:
        """What a graph is given before all else, of no dimension."""
        with graph.inserting_before(_first(graph)):
            made: fx.Node = graph.placeholder(name)
        with self._mode:
            made.meta["val"] = torch.empty((), dtype=dtype, device=self._device)
        return made

    def _turn(self) -> fx.GraphModule:
        """One of the `scan`: the loop's own, or of nothing new, past the last.

        Past that the first states are gone through, of which there is a turn as a rule: what is
        infinite elsewhere, would be NaN in the gradient, of a cotangent of 0.
        """
        changed: fx.GraphModule = copy.deepcopy(self._body)
        graph = changed.graph
        places = graph.find_nodes(op="placeholder")
        states = places[: len(self._carried)]
        call = self._within(graph, next(node for node in graph.nodes if node.op != "placeholder"))
        last = states[-1]
        taken: list[fx.Node] = []
        number = partial(torch.empty, (), dtype=torch.int64, device=self._device)
        with self._mode:
            values = [number(), number(), *(torch.empty_like(node.meta["val"]) for node in states)]
        names = ["at", "count", *(f"first_{state.name}" for state in states)]
        for name, value in zip(names, values, strict=True):
            with graph.inserting_after(last):
                last = graph.placeholder(name)
            last.meta["val"] = value
            taken.append(last)
        at, count, *firsts = taken
        live = call(aten.lt.Tensor, at, count)
        for state, first in zip(states, firsts, strict=True):
            users = {*state.users}
            given = _chosen(call, live, state, first)
            state.replace_all_uses_with(given, users.__contains__)
        output = graph.output_node()
        call = self._within(graph)
        left: Any = output.args[0]
        output.args = (
            tuple(_chosen(call, live, new, old) for new, old in zip(left, states, strict=True)),
        )
        changed.recompile()
        return changed

    def _within(self, graph: fx.Graph, before: fx.Node | None = None) -> Callable[..., fx.Node]:
        """Makes nodes of a graph inside, before its output unless another node is given."""
        sizes, at = Sizes(graph, self._mode), before or graph.output_node()

        def call(target: Any, *args: Any) -> fx.Node:
            made: fx.Node = sizes.call(at, target, *args)
            within(made, self._loop)
            return made

        return call


def _first(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(iter(graph.nodes))
    return first


def _inlined(
    into: fx.GraphModule, before: fx.Node, module: fx.GraphModule, given: Sequence[Any]
) -> tuple[Any, ...]:
    """What a graph returns, computed by another one before a node."""
    made: dict[fx.Node, Any] = dict(
        zip(module.graph.find_nodes(op="placeholder"), given, strict=True)
    )
    for node in module.graph.nodes:
        if node.op == "output":
            break
        if node in made:
            continue
        with into.graph.inserting_before(before):
            copied = made[node] = into.graph.node_copy(node, made.__getitem__)
        if node.op == "get_attr":
            copied.target = added(into, getattr(module, str(node.target)), "until")
    left: Any = fx.node.map_arg(module.graph.output_node().args[0], made.__getitem__)
    return tuple(left) if isinstance(left, tuple | list) else (left,)


def _chosen(call: Callable[..., fx.Node], condition: Any, yes: Any, no: Any) -> fx.Node:
    """One of two; of booleans by logic, since ONNX Runtime has no Where of them."""
    if _value(yes).dtype is not torch.bool:
        return call(aten.where.self, condition, yes, no)
    there = call(aten.logical_and.default, condition, yes)
    elsewhere = call(aten.logical_and.default, call(aten.logical_not.default, condition), no)
    return call(aten.logical_or.default, there, elsewhere)


def _value(given: Any) -> Any:
    return given.meta["val"] if isinstance(given, fx.Node) else given
