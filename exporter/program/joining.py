"""Two captures of one model that differ by a decision, as one program with a `cond`.

What both compute is computed once. From where they part, as far as they do other things, each has
a graph of its own in the `cond`; behind it, what both do to what differs is done to its results.
"""

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fuseport.exporter.program import Program, rebuilt, shape_env
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program.matching import (
    ASSERT,
    Inseparable,
    Matched,
    Pair,
    evaluate,
    marked,
    marker,
    mode_of,
    plain,
    with_constants,
)
from fuseport.exporter.program.regions import COND, added

__all__ = ["Region", "alike", "either", "joined", "keep_guards", "sort"]

aten = torch.ops.aten

_CONTIGUOUS: Any = {"memory_format": torch.contiguous_format}  # as those of the other way are


def alike(one: Program, other: Program) -> bool:
    """Whether two programs compute the same by the same operators, but for decisions of one."""
    try:
        matched = Matched(one.exported, other.exported)
        return all(matched.met(a, b) for a, b in matched.results())
    except Inseparable:
        return False


def joined(
    name: str, yes: Program, no: Program, others: Mapping[str, bool | None] | None = None
) -> Program:
    """A program that does what one of two does, by a decision.

    Args:
        name: of the decision, which both programs have marked.
        yes: the program where it is true.
        no: where it is false.
        others: decisions that are marked in one of the programs alone, by name, and what they come
            to in the other one; None for those whose marks are not needed any more.

    Raises:
        Inseparable: they differ by their sizes, or by what no graph inside a graph can have.
    """
    programs = yes.exported, no.exported
    marks = tuple(marked(exported.graph) for exported in programs)
    for found, there, other in zip(marks, marks[::-1], programs[::-1], strict=True):
        for each in (found.keys() - there.keys()) & (others or {}).keys():
            value = (others or {})[each]
            if value is None:
                found[each].graph.erase_node(found[each])
            else:
                _mark(other.graph, each, value)
    matched = Matched(with_constants(yes.exported, no.exported), no.exported)
    keep_guards(yes.exported, no.exported)
    marks = marked(matched.one), marked(matched.other)
    if name not in marks[0] or marks[0].keys() != marks[1].keys():
        raise Inseparable("such a decision leads to others")
    if not matched.met(marks[0][name].args[0], marks[1][name].args[0]):
        raise Inseparable("such a decision is computed in two ways")
    return replace(yes, exported=_Join(matched, marks[0][name].args[0]).made())


def _mark(graph: fx.Graph, name: str, value: bool) -> None:
    """Mark a decision that always comes to one value."""
    output = graph.output_node()
    with graph.inserting_before(output):
        always = graph.call_function(aten.full.default, ([], value), {"dtype": torch.bool})
        evaluate(always, mode_of(graph))
        graph.call_function(ASSERT, (always, marker(name)))


def keep_guards(one: ExportedProgram, other: ExportedProgram) -> None:
    """Have what torch took for granted of sizes in either capture be so of the first one's.

    Raises:
        Inseparable: their sizes have other names, or other ranges.
    """
    sizes = [
        [str(node.meta["val"].shape) for node in each.graph.find_nodes(op="placeholder")
         if node.name in each.graph_signature.user_inputs]
        for each in (one, other)
    ]  # fmt: skip
    if sizes[0] != sizes[1] or one.range_constraints != other.range_constraints:
        raise Inseparable("such a decision is about sizes")
    guards = shape_env(one).guards
    known = {guard.expr for guard in guards}
    guards += [guard for guard in shape_env(other).guards if guard.expr not in known]


class _Join:
    """The first graph of two, in the making of one that does what either does."""

    def __init__(self, matched: Matched, predicate: fx.Node) -> None:
        self._matched, self._predicate = matched, predicate
        self._shared = matched.shared
        self._apart: set[Pair] = set()  # pairs that are no tensors' and must not be joined
        self._same: dict[fx.Node, fx.Node] = {}
        self._joins: dict[Pair, fx.Node | None] = {}

    def made(self) -> ExportedProgram:
        while not self._paired():
            pass
        graph = self._matched.one
        if self._joins:
            self._decide(graph)
        for a, b in self._same.items():
            a.args, a.kwargs = self._chosen((a.args, a.kwargs), (b.args, b.kwargs))
        marks = marked(graph), marked(self._matched.other)
        for name, mark in marks[0].items():
            mark.args = self._chosen(mark.args, marks[1][name].args)
        output = graph.output_node()
        output.args = self._chosen(output.args, self._matched.other.output_node().args)
        sort(graph)
        graph.eliminate_dead_code()
        graph.lint()
        self._matched.module.recompile()
        exported = self._matched.exported
        return rebuilt(exported, graph, exported.graph_signature.input_specs)

    def _paired(self) -> bool:
        """Find what is done to what differs, and what is to be joined; whether that can be."""
        self._same, self._joins = {}, {}
        waiting: list[tuple[Pair, Pair | None]] = [(p, None) for p in self._matched.results()]
        while waiting:
            pair, user = waiting.pop()
            a, b = pair
            if self._matched.met(a, b) or self._same.get(a) is b or pair in self._joins:
                continue
            within = self._within(a, b)
            if within is not None and a not in self._same:
                self._same[a] = b
                waiting += ((each, pair) for each in within)
            elif isinstance(a.meta.get("val"), Tensor):
                self._joins[pair] = None
            elif user is None:
                raise Inseparable("an output that is no tensor differs by a decision")
            else:
                self._apart.add(user)
                return False
        return True

    def _within(self, a: fx.Node, b: fx.Node) -> list[Pair] | None:
        """The arguments of two nodes, in pairs, if the nodes do the same to them."""
        if a in self._shared or b in self._matched.common or (a, b) in self._apart:
            return None
        flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in (a, b)]
        (ours, spec), (theirs, other) = flat
        if a.op != b.op or a.target is not b.target or a.op != "call_function" or spec != other:
            return None
        found: list[Pair] = []
        for one, two in zip(ours, theirs, strict=True):
            if isinstance(one, fx.Node) and isinstance(two, fx.Node):
                found.append((one, two))
            elif plain(one) != plain(two):
                return None
        return found

    def _chosen(self, ours: Any, theirs: Any) -> Any:
        """Arguments of the first graph's, with what is joined in the place of what differs."""
        flat, spec = pytree.tree_flatten(ours)
        pairs = zip(flat, pytree.tree_leaves(theirs), strict=True)
        return pytree.tree_unflatten([self._joins.get((a, b)) or a for a, b in pairs], spec)

    def _decide(self, graph: fx.Graph) -> None:
        """Compute what is joined: torch's `cond` has gradients only if all of its results do."""
        for a, b in self._joins:
            if _signature(a) != _signature(b):
                raise Inseparable("such a decision changes the sizes of what is computed")
        pairs = [[], []]  # type: list[list[Pair]]
        for pair in self._joins:
            pairs[pair[0].meta["val"].is_floating_point()].append(pair)
        with graph.inserting_before(graph.output_node()):
            for each, differentiable in zip(pairs, (False, True), strict=True):
                if each:
                    self._cond(graph, each, differentiable=differentiable)

    def _cond(self, graph: fx.Graph, pairs: Sequence[Pair], *, differentiable: bool) -> None:
        module, common = self._matched.module, self._matched.common
        placeholders = self._matched.one.find_nodes(op="placeholder")
        ours = Region(module, {node: node for node in (*self._shared, *placeholders)})
        theirs = Region(self._matched.other_module, common)
        ways = [(region, [pair[i] for pair in pairs]) for i, region in enumerate((ours, theirs))]
        chosen = either(module, self._predicate, *ways, differentiable=differentiable)
        self._joins |= zip(pairs, chosen, strict=True)


def either(
    module: fx.GraphModule,
    predicate: fx.Node,
    yes: tuple["Region", Sequence[fx.Node]],
    no: tuple["Region", Sequence[fx.Node]],
    *,
    differentiable: bool,
) -> list[fx.Node]:
    """Have a `cond` where its graph inserts.

    Args:
        module: whose graph gets it.
        predicate: by which it decides.
        yes: what it computes where that is true, and what it returns of that.
        no: where it is false.
        differentiable: whether what is returned has gradients, all of it.

    Returns:
        What it returns.

    Raises:
        Inseparable: either way has other sizes, or what no graph inside can have.
    """
    graph = module.graph
    operands = list(
        dict.fromkeys(node for region, own in (yes, no) for node in region.operands(own))
    )
    given = tuple(operands)
    if not differentiable:
        given = tuple(graph.call_function(aten.detach.default, (node,)) for node in operands)
        for node in given:
            evaluate(node, operands[0].meta["val"].fake_mode)
    inside = [region.graph(operands, own) for region, own in (yes, no)]
    names = [added(module, body, way) for way, body in zip(("yes", "no"), inside, strict=True)]
    call = graph.call_function(COND, (predicate, *map(graph.get_attr, names), given))
    left: Any = inside[0].graph.output_node().args[0]
    call.meta["val"] = tuple(node.meta["val"] for node in left)
    results = []
    for i, value in enumerate(call.meta["val"]):
        result = graph.call_function(operator.getitem, (call, i))
        result.meta["val"] = value
        results.append(_with_whole_gradient(result) if differentiable else result)
    return results


def _with_whole_gradient(node: fx.Node) -> fx.Node:
    """The same, whose gradient is contiguous: torch's `cond` wants both ways' of one layout."""
    value, graph = node.meta["val"], node.graph
    if value.dim() < 2:
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        evaluate(made, value.fake_mode)
        return made

    sizes = [
        call(aten.sym_size.int, node, dim) if isinstance(size, torch.SymInt) else size
        for dim, size in enumerate(value.shape)
    ]
    return call(aten.reshape.default, call(aten.reshape.default, node, [-1]), sizes)


class Region:
    """What one of two programs computes that both do not.

    Args:
        root: the program's.
        shared: its nodes that both have, and what they are in the graph that calls the region.
    """

    def __init__(self, root: fx.GraphModule, shared: Mapping[fx.Node, fx.Node]) -> None:
        self._root, self._shared = root, shared

    def operands(self, results: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """The tensors that it is given, as nodes of the graph that calls it."""
        for node in self._needed(results):
            if self._is_given(node):
                yield self._shared[node]

    def graph(self, operands: list[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
        """It as a graph of `operands` that returns copies of `results`."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        given: dict[fx.Node, fx.Node] = {}
        for i, operand in enumerate(operands):
            given[operand] = graph.placeholder(f"operand_{i}")
            given[operand].meta["val"] = operand.meta["val"]
        if not operands:
            raise Inseparable("such a decision is about constants alone")
        mode = operands[0].meta["val"].fake_mode
        for node in self._needed(results):
            made[node] = (
                given[self._shared[node]]
                if self._is_given(node)
                else _recomputed(graph, node, made, mode, self._root)
            )
        copies = []
        for node in results:
            copies.append(graph.call_function(aten.clone.default, (made[node],), _CONTIGUOUS))
            evaluate(copies[-1], mode)
            if _signature(node) != _signature(copies[-1]):
                raise Inseparable("such a decision changes the sizes of what is computed")
        graph.output(tuple(copies))
        return fx.GraphModule(self._root, graph)

    def _is_given(self, node: fx.Node) -> bool:
        return node in self._shared and isinstance(node.meta.get("val"), Tensor)

    def _needed(self, results: Iterable[fx.Node]) -> list[fx.Node]:
        """What it computes and is given, in the program's order."""
        found = needed(results, lambda n: [] if self._is_given(n) else n.all_input_nodes)
        return [node for node in self._root.graph.nodes if node in found]


def _recomputed(
    graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node], mode: Any, root: Any
) -> fx.Node:
    """A node's copy in another graph, over the sizes of that.

    Args:
        graph: the other one.
        node: what is copied.
        made: the copies of what it takes.
        mode: of the fakes there.
        root: what holds the graphs inside; they are made over as they are.
    """
    if node.meta.get("unbacked_bindings"):
        raise Inseparable("such a decision is about sizes that depend on values")
    copied = graph.node_copy(node, made.__getitem__)
    if node.op == "get_attr":
        return copied
    if node.target is COND:
        operands = [each.meta["val"] for each in copied.args[3]]  # type: ignore[union-attr]
        for body in node.all_input_nodes:
            if body.op == "get_attr":
                copied.meta["val"] = _made_over(getattr(root, str(body.target)), operands, mode)
    elif isinstance(node.target, HigherOrderOperator):
        raise Inseparable(f"such a decision is about a {node.target}")
    else:
        evaluate(copied, mode)
    return copied


def _made_over(body: Any, operands: Sequence[Any], mode: Any) -> tuple[Any, ...]:
    """Let a graph inside be over other fakes; what it returns."""
    made: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    given = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            made[node] = graph.node_copy(node)
            made[node].meta["val"] = next(given)
        elif node.op != "output":
            made[node] = _recomputed(graph, node, made, mode, body)
    results = fx.node.map_arg(body.graph.output_node().args[0], made.__getitem__)
    graph.output(results)
    body.graph = graph
    body.recompile()
    return tuple(each.meta["val"] for each in results)


def _signature(node: fx.Node) -> Hashable:
    value = node.meta["val"]
    return str(tuple(value.shape)), value.dtype, value.device


def sort(graph: fx.Graph) -> None:
    """Put each node behind what it takes, and otherwise leave the order as it is."""
    order: dict[fx.Node, None] = {}
    for node in graph.nodes:
        waiting = [node]
        while waiting:
            missing = [each for each in waiting[-1].all_input_nodes if each not in order]
            if missing:
                waiting += missing
            else:
                order.setdefault(waiting.pop())
    output = graph.output_node()
    for node in order:
        if node is not output:
            output.prepend(node)
