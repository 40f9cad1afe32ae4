"""What the loops of a gradient program need not do at every step.

Torch differentiates a `scan` as it is: the loop over the steps keeps what their derivatives need,
for a loop back over them. At every step it keeps what all steps share, too, such as weights; and
the gradients of what they share are added up step by step, each a product of matrices. Here loops
back get the former once, and the latter is one product after the loop, over all its steps:
Σ_t a_t·b_t = [a_1 … a_T]·[b_1; …; b_T].
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from fuseport.exporter.program._drawing import draws
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import SCAN, view_of

__all__ = ["lighten"]

aten = torch.ops.aten

_SMALL = 4096  # numbers in a product, of which memory may hold one for each step
_SUM = aten.sum.dim_IntList
_ZEROS = (aten.zeros.default, aten.zeros_like.default)
_VIEWS: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten.reshape.default: aten.reshape.default,
    aten.t.default: aten.t.default,
    aten.transpose.int: aten.transpose.int,
}


def lighten(module: fx.GraphModule) -> None:
    """Take out of each `scan` of a graph what needs no loop; what it computes stays the same."""
    loops = {loop.node: loop for loop in _found(module)}
    for loop in loops.values():
        _hand_over_once(loop, loops)
    for loop in loops.values():
        _add_up_outside(loop)
    for loop in loops.values():
        loop.write()


@dataclass(eq=False)
class _Given:
    """What goes into a loop: a node outside, and the placeholder of its body."""

    outside: fx.Node
    inside: fx.Node


@dataclass(eq=False)
class _Result:
    """What a step gives, and nodes outside that take it: of the last step, or of all, stacked."""

    inside: fx.Node
    value: Tensor
    taken: list[fx.Node] = field(default_factory=list)


@dataclass(eq=False)
class _Loop:
    """A `scan` of a graph: `node` calls it with a graph of one step, `body`.

    `states` go from step to step, and become those at their places in `last`; of `slices` a step
    gets one each; `shared` are the same at all steps. `kept` is what a step gives besides.
    What is computed of that outside stands before `end`.
    """

    node: fx.Node
    body: fx.GraphModule
    states: list[_Given]
    slices: list[_Given]
    shared: list[_Given]
    last: list[_Result]
    kept: list[_Result]
    end: fx.Node

    def given(self, inside: fx.Node) -> fx.Node | None:
        """What a node of the body is at all steps, outside, if that is there."""
        for slice_ in self.slices:
            if slice_.inside is inside:
                return slice_.outside
        found = next((result for result in self.kept if result.inside is inside), None)
        return None if found is None else self._taken(found)

    def stacked(self, inside: fx.Node) -> fx.Node:
        """What a node of the body is at all steps, outside."""
        return self.given(inside) or self._taken(self._keep(inside))

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Call an operator outside, after the loop."""
        with self.node.graph.inserting_before(self.end):
            return _call(self.node, target, *args)

    def _keep(self, inside: fx.Node) -> _Result:
        value, length = inside.meta["val"], self.slices[0].outside.meta["val"].shape[0]
        if inside.op == "placeholder" or any(inside is result.inside for result in self.last):
            # A state must not be kept itself.
            with self.body.graph.inserting_before(self.body.graph.output_node()):
                inside = _call(inside, aten.clone.default, inside)
        with value.fake_mode:
            self.kept.append(_Result(inside, value.new_empty((length, *value.shape))))
        return self.kept[-1]

    def _taken(self, result: _Result) -> fx.Node:
        if not result.taken:
            taken = self.node.graph.call_function(operator.getitem, (self.node, 0))
            taken.meta["val"] = result.value
            within(taken, self.node)
            result.taken.append(taken)
        self.node.append(result.taken[0])  # what is computed of it stands behind
        return result.taken[0]

    def write(self) -> None:
        """Put it into both graphs, without what nothing is made of."""
        graph, results = self.body.graph, [*self.last, *self.kept]
        output = graph.output_node()
        output.args = (_like(output.args[0], [result.inside for result in results]),)
        graph.eliminate_dead_code()
        slices = [given for given in self.slices if given.inside.users] or self.slices[:1]
        shared = [given for given in self.shared if given.inside.users]
        kinds = self.states, slices, shared
        inside = [given.inside for kind in kinds for given in kind]
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for placeholder in inside:
            first.prepend(placeholder)
        for placeholder in graph.find_nodes(op="placeholder"):
            if placeholder not in inside:
                graph.erase_node(placeholder)
        self.body.recompile()
        body, *old = self.node.args
        new = [[given.outside for given in kind] for kind in kinds]
        self.node.args = (body, *map(_like, old, new))
        self.node.meta["val"] = tuple(result.value for result in results)
        for at, result in enumerate(results):
            for taken in result.taken:
                taken.args = (self.node, at)


def _like(old: Any, new: list[fx.Node]) -> Any:
    return tuple(new) if isinstance(old, tuple) else new


def _found(module: fx.GraphModule) -> Iterator[_Loop]:
    nodes: Any = module.graph.find_nodes(op="call_function", target=SCAN)
    bodies = Counter(node.args[0].target for node in nodes)
    for node in nodes:
        name = node.args[0].target
        body: Any = module.get_submodule(name)
        outside = [list(given) for given in node.args[1:]]
        results = list(body.graph.output_node().args[0])
        users = list(node.users)
        if bodies[name] > 1 or not all(user.target is operator.getitem for user in users):
            continue
        if not all(isinstance(each, fx.Node) for each in chain(results, *outside)):
            continue
        placeholders = iter(body.graph.find_nodes(op="placeholder"))
        states, slices, shared = (
            [_Given(each, next(placeholders)) for each in kind] for kind in outside
        )
        taken = [[user for user in users if user.args[1] == i] for i in range(len(results))]
        found = [_Result(*each) for each in zip(results, node.meta["val"], taken, strict=True)]
        last, kept = found[: len(states)], found[len(states) :]
        end = node.next
        while end in users:
            end = end.next
        yield _Loop(node, body, states, slices, shared, last, kept, end)


def _hand_over_once(loop: _Loop, loops: dict[fx.Node, _Loop]) -> None:
    """What a loop keeps for other loops, and is the same at all steps, they get from outside."""
    outside = {given.inside: given.outside for given in loop.shared}
    fixed = set(outside)
    for node in loop.body.graph.nodes:
        inputs = node.all_input_nodes
        if inputs and fixed.issuperset(inputs) and not draws(node):
            fixed.add(node)
    for result in list(loop.kept):
        takers = _takers(result.taken, loops)
        if result.inside not in fixed or not takers:
            continue
        loop.kept.remove(result)
        with loop.node.graph.inserting_before(loop.node):
            once = _copied(result.inside, outside, loop.node)
        for other, given in takers:
            other.slices.remove(given)
            other.shared.append(_Given(once, given.inside))


def _takers(nodes: Sequence[fx.Node], loops: dict[fx.Node, _Loop]) -> list[tuple[_Loop, _Given]]:
    """What some nodes are in the loops that take them as slices, perhaps turned about; nothing if
    something else takes them."""
    found: list[tuple[_Loop, _Given]] = []
    for node in nodes:
        for user in node.users:
            of_user = []
            if user.target is aten.flip.default and user.args[1] == [0]:
                of_user = _takers([user], loops)
            elif loop := loops.get(user):
                if all(given.outside is not node for given in (*loop.states, *loop.shared)):
                    of_user = [(loop, given) for given in loop.slices if given.outside is node]
                if len(of_user) == len(loop.slices):  # a scan has a slice
                    return []
            if not of_user:
                return []
            found += of_user
    return found


def _copied(node: fx.Node, outside: dict[fx.Node, fx.Node], of: fx.Node) -> fx.Node:
    """A node of a loop's body, computed outside; contiguous, as it is in the body."""
    if node not in outside:
        args = fx.node.map_arg(node.args, lambda each: _copied(each, outside, of))
        kwargs = fx.node.map_arg(node.kwargs, lambda each: _copied(each, outside, of))
        view = view_of(node)
        outside[node] = _call(of, view or node.target, *args, **kwargs)
        if view is not None:
            layout = {"memory_format": torch.contiguous_format}
            outside[node] = _call(of, aten.clone.default, outside[node], **layout)
    return outside[node]


def _add_up_outside(loop: _Loop) -> None:
    """States that are sums of something of each step are summed up after the loop."""
    for state, result in list(zip(loop.states, loop.last, strict=True)):
        added = _added(state.inside, result.inside, loop)
        if added is None or not _is_sum(added) or len(loop.states) == 1:  # a scan has a state
            continue
        total = _total(loop, added)
        if state.outside.target not in _ZEROS:
            total = loop.call(aten.add.Tensor, state.outside, total)
        for taken in result.taken:
            taken.replace_all_uses_with(total)
        loop.states.remove(state)
        loop.last.remove(result)


def _added(state: fx.Node, result: fx.Node, loop: _Loop) -> fx.Node | None:
    """What a step adds to a state, if it does nothing else with it."""
    if result.target is not aten.add.Tensor or result.kwargs or len(result.args) != 2:
        return None
    if list(state.users) != [result] or list(result.users) != [loop.body.graph.output_node()]:
        return None
    others = [each for each in result.args if each is not state]
    if any(kept.inside is result for kept in loop.kept) or len(others) != 1:
        return None
    (added,) = others
    if not isinstance(added, fx.Node):
        return None
    before, value = state.meta["val"], added.meta["val"]
    return added if (before.shape, before.dtype) == (value.shape, value.dtype) else None


def _is_sum(node: fx.Node) -> bool:
    """Whether its sum over all steps can be had without the node itself at each step."""
    match node.target, node.args:
        case aten.mm.default, (fx.Node() as a, fx.Node() as b):
            sizes = a.meta["val"].shape[0], b.meta["val"].shape[1]
            return all(isinstance(size, int) for size in sizes)
        case aten.add.Tensor, (fx.Node() as a, fx.Node() as b):
            return not node.kwargs and _is_sum(a) and _is_sum(b)
        case target, (fx.Node() as of, *_):
            alone = node.all_input_nodes == [of]  # no symbolic sizes
            return alone and (target is _SUM or (target in _VIEWS and _is_sum(of)))
    return False


def _total(loop: _Loop, node: fx.Node) -> fx.Node:
    """The sum over all steps of what `_is_sum`, outside."""
    match node.target, node.args:
        case aten.mm.default, (fx.Node() as a, fx.Node() as b):
            return _product(loop, a, b)
        case aten.add.Tensor, (fx.Node() as a, fx.Node() as b):
            return loop.call(aten.add.Tensor, _total(loop, a), _total(loop, b))
        case target, (fx.Node() as of, *others) if target in _VIEWS:
            return loop.call(_VIEWS[target], _total(loop, of), *others)
        case _, (fx.Node() as of, list(dims), *kept) if loop.given(of) and not node.kwargs:
            # In two steps, which round less than one sum of all.
            dims = [dim % of.meta["val"].dim() + 1 for dim in dims]
            return loop.call(_SUM, loop.call(_SUM, loop.stacked(of), dims, *kept), [0])
    return loop.call(_SUM, loop.stacked(node), [0])


def _product(loop: _Loop, a: fx.Node, b: fx.Node) -> fx.Node:
    """The sum over all steps of a·b: small ones step by step, as torch rounds them."""
    rows, columns = a.meta["val"].shape[0], b.meta["val"].shape[1]
    right = loop.stacked(b)
    if a.target is aten.t.default:
        (turned,) = a.all_input_nodes
        left = loop.call(aten.transpose.int, loop.stacked(turned), 1, 2)
    else:
        left = loop.stacked(a)
    if rows * columns <= _SMALL:
        return loop.call(_SUM, loop.call(aten.bmm.default, left, right), [0])
    left = loop.call(aten.permute.default, left, [1, 0, 2])
    left = loop.call(aten.reshape.default, left, [rows, -1])
    right = loop.call(aten.reshape.default, right, [-1, columns])
    return loop.call(aten.mm.default, left, right)


def _call(of: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Call an operator where the graph inserts nodes; it belongs to the layer of a node."""
    node = of.graph.call_function(target, args, kwargs)
    known = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
    with detect_fake_mode(known) or mode_of(of.graph):  # of sizes alone, as a range, it has none
        node.meta["val"] = target(*known[0], **known[1])
    within(node, of)
    return node
