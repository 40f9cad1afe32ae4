"""Which nodes of two captures of one model are the same computation."""

import copy
import itertools
from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import rebuilt
from fuseport.exporter.program._drawing import acts, draws

__all__ = [
    "ASSERT",
    "Inseparable",
    "Matched",
    "Pair",
    "constants_once",
    "evaluate",
    "marked",
    "marker",
    "marks",
    "mode_of",
    "plain",
    "region_key",
    "unmark",
    "with_constants",
]

ASSERT = torch.ops.aten._assert_async.msg
"""What marks a decision in a capture, and fails in artifacts."""

_ASSERT_SCALAR = torch.ops.aten._assert_scalar.default
_ASSERT_METADATA = torch.ops.aten._assert_tensor_metadata.default
_MARK = "decision "

Pair = tuple[fx.Node, fx.Node]
"""A node of the first graph, and one of the second."""


class Inseparable(ExportFailed):
    """Two programs differ by more than a `cond` can say."""


def marker(name: str) -> str:
    """The message of the assertion that stands, in a capture, for a decision of model code."""
    return f"{_MARK}{name}"


def marks(node: fx.Node) -> str | None:
    """The name of the decision that an assertion stands for, if it does."""
    said = str(node.args[1])
    return said.removeprefix(_MARK) if said.startswith(_MARK) else None


def marked(graph: fx.Graph) -> dict[str, Any]:
    """The assertions of a graph that stand for decisions, by the decision's name."""
    nodes = graph.find_nodes(op="call_function", target=ASSERT)
    return {name: node for node in nodes if (name := marks(node)) is not None}


def unmark(graph: fx.Graph, names: Container[str]) -> None:
    """Take away the assertions that stand for some decisions."""
    for name, mark in marked(graph).items():
        if name in names:
            graph.erase_node(mark)


class Matched:
    """Which nodes of two graphs are the same computation.

    Attributes:
        one: the first one's graph, a copy.
        other: the second's.
        common: of the second one's nodes those that the first has, too, and what they are there.
        shared: the first one's nodes that the second has, too.
    """

    def __init__(self, one: ExportedProgram, other: ExportedProgram) -> None:
        self.exported = one
        self.module = copy.deepcopy(one.graph_module)
        self.one, self.other = self.module.graph, other.graph
        for node in filter(_is_of_torch, list(self.one.nodes)):
            self.one.erase_node(node)
        self.other_module = other.graph_module
        known: dict[Hashable, list[fx.Node]] = defaultdict(list)
        # Of each of its nodes, the first that computes the same: `common` has that in their place.
        self._first: dict[fx.Node, fx.Node] = {}
        inputs = _inputs(one), _inputs(other)
        for node in self.one.nodes:
            alike = known[_key(node, self._first, inputs[0], self.module)]
            alike.append(node)
            self._first[node] = node if draws(node) else alike[0]
        self.common: dict[fx.Node, fx.Node] = {}
        drawn: dict[Hashable, int] = defaultdict(int)
        for node in self.other.nodes:
            if not all(each in self.common for each in node.all_input_nodes):
                continue
            key = _key(node, self.common, inputs[1], self.other_module)
            place = drawn[key] if draws(node) else 0
            if place < len(known[key]):
                self.common[node] = known[key][place]
                drawn[key] += 1

        there = {*self.common.values()}
        self.shared = {node for node, first in self._first.items() if first in there}
        for graph, nodes in (self.one, self.shared), (self.other, self.common):
            both = {*nodes, *marked(graph).values()}
            if any(
                n.op == "call_function" and acts(n) and n not in both and not _is_of_torch(n)
                for n in graph.nodes
            ):
                raise Inseparable("such a decision is about what is asserted")

    def met(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether a node of the first graph computes what one of the second does."""
        first = self._first.get(a)
        return first is not None and self.common.get(b) is first

    def results(self) -> Iterator[Pair]:
        """What the programs return and what they decide by, in pairs.

        Raises:
            Inseparable: they return different things.
        """
        marks = marked(self.one), marked(self.other)
        found = [
            [*_nodes(graph.output_node().args), *(own[n].args[0] for n in sorted(own))]
            for graph, own in zip((self.one, self.other), marks, strict=True)
        ]
        if len(found[0]) != len(found[1]) or marks[0].keys() != marks[1].keys():
            raise Inseparable("such a decision leads to others, or to other outputs")
        return zip(*found, strict=True)


def with_constants(one: ExportedProgram, other: ExportedProgram) -> ExportedProgram:
    """The first program, which takes constants of the second that it has not, too."""
    known, there = _inputs(one), _inputs(other)
    wanted = [
        spec
        for spec in other.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR and there[spec.arg.name] not in known.values()
    ]
    if not wanted:
        return one
    module = copy.deepcopy(one.graph_module)
    graph, specs = module.graph, list(one.graph_signature.input_specs)
    constants, mode = dict(one.constants), mode_of(graph)
    place = next(i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT)
    first = graph.find_nodes(op="placeholder")[place]
    for number, spec in enumerate(wanted, len(constants)):
        name, value = f"constant_of_way_{number}", other.constants[str(spec.target)]
        with graph.inserting_before(first):
            node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        constants[node.name] = value
        specs.insert(
            place, InputSpec(spec.kind, TensorArgument(node.name), node.name, spec.persistent)
        )
        place += 1
    return rebuilt(one, graph, specs, constants=constants)


def constants_once(exported: ExportedProgram) -> ExportedProgram:
    """A program that takes equal constants as one, in place: code makes them anew in each turn."""
    stands, first = _inputs(exported), dict[Hashable, fx.Node]()
    kept: list[InputSpec] = []
    graph = exported.graph
    placeholders = graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        same = first.setdefault(stands[spec.arg.name], node)
        if same is node or spec.kind is not InputKind.CONSTANT_TENSOR:
            kept.append(spec)
            continue
        node.replace_all_uses_with(same)
        graph.erase_node(node)
    return rebuilt(exported, graph, kept) if len(kept) < len(placeholders) else exported


def mode_of(graph: fx.Graph) -> Any:
    """The mode of the fakes that a graph is over."""
    return graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode


def evaluate(node: fx.Node, mode: Any) -> None:
    """Give a node the fake of its value."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    # What is taken for granted of sizes here, was in the capture.
    quiet = mode.shape_env.suppress_guards()
    with mode, enable_python_dispatcher(), torch.no_grad(), quiet:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _inputs(exported: ExportedProgram) -> dict[str, Hashable]:
    """What each placeholder stands for; constants by their values."""
    found: dict[str, Hashable] = {}
    users = itertools.count()
    for spec in exported.graph_signature.input_specs:
        stands: Hashable = (spec.kind, spec.target)
        if spec.kind is InputKind.USER_INPUT:
            stands = (spec.kind, next(users))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = exported.constants[str(spec.target)].detach().contiguous()
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            stands = (value.dtype, tuple(value.shape), data)
        found[spec.arg.name] = stands
    return found


def _key(
    node: fx.Node,
    known: Mapping[fx.Node, fx.Node],
    inputs: Mapping[str, Hashable],
    module: fx.GraphModule,
) -> Hashable:
    """What is the same for two nodes that compute the same, of arguments that are the same."""
    if node.op == "placeholder":
        return "placeholder", inputs[node.name]
    if node.op == "get_attr":
        return "get_attr", region_key(getattr(module, str(node.target)))
    if node.op == "output":
        return node.op, id(node)  # of which there is none in another graph
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    return (
        node.target,
        str(spec),
        tuple(known[each] if isinstance(each, fx.Node) else plain(each) for each in flat),
    )


def region_key(module: Any) -> Hashable:
    """What is the same for graphs inside that compute the same."""
    if not isinstance(module, fx.GraphModule):
        return id(module)
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    lines: list[Hashable] = []
    for node in module.graph.nodes:
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        target: Hashable = node.target if node.op == "call_function" else node.op
        if node.op == "get_attr":
            target = region_key(getattr(module, str(node.target)))
        given = tuple(number[e] if isinstance(e, fx.Node) else plain(e) for e in flat)
        lines.append((target, str(spec), given))
    return tuple(lines)


def plain(value: Any) -> Hashable:
    """A value that is no node's: 1, 1.0 and True are three."""
    return type(value).__name__, repr(value)


def _nodes(tree: Any) -> list[fx.Node]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, fx.Node)]


def _is_of_torch(node: fx.Node) -> bool:
    """Whether it is an assertion of torch's own, on sizes that hang on values, or on dtypes."""
    if node.target is _ASSERT_METADATA:
        return True
    said = str(node.args[-1]) if node.target is _ASSERT_SCALAR else ""
    return said.startswith("Runtime assertion failed")
