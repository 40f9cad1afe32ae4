"""Programs cut out of a program: with values of its graph as outputs, or as inputs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from fuseport.exporter.program import Program, TensorSpec, rebuilt
from fuseport.exporter.program.forward import output_specs

__all__ = [
    "ENTRY",
    "between",
    "called",
    "cut",
    "needs",
    "node_of",
    "shapes",
    "with_entries",
    "with_outputs",
]

ENTRY = "entry_"
"""What the name of an input begins with that stands for a value of the graph."""

# Their values are nobody's concern.
_UNSET = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}


def node_of(program: Program) -> dict[str, str]:
    """The node that each output of a program is, by name; of inputs and parameters too.

    Gradients of inputs and parameters are called `grad/<name>` among the outputs.
    """
    signature = program.exported.graph_signature
    outputs = zip(program.outputs, signature.user_outputs, strict=True)
    inputs = zip(program.inputs, signature.user_inputs, strict=True)
    named = {spec.name: str(node) for spec, node in inputs}
    for spec in signature.input_specs:
        if spec.target is not None:
            named[spec.target] = spec.arg.name
    return {**named, **{spec.name: str(node) for spec, node in outputs}}


def needs(program: Program) -> dict[str, list[str]]:
    """Each value of the graph, in order, and those that it is computed from."""
    graph = program.exported.graph
    return {n.name: [m.name for m in n.all_input_nodes] for n in graph.nodes if n.op != "output"}


def called(node: fx.Node) -> str:
    """The operator that computes a node, `aten::mm` for example; of one of several results too."""
    while node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        following = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), tuple | list)]
        if not following:
            return getattr(node.target, "__name__", str(node.target))
        node = following[0]
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)


def shapes(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the graph that a call computes from its inputs.

    Those whose sizes depend on values, such as how many tokens go to an expert, are left out; and
    complex ones, which no program gives.

    Args:
        program: any.
        inputs: of the call, for the sizes of its dynamic dimensions.
    """
    symbols = _symbols(program, inputs)
    known: dict[str, int | None] = {}

    def concrete(size: int | torch.SymInt) -> int | None:
        if isinstance(size, int):
            return size
        text = str(size)
        if text not in known:
            found = sympy.sympify(size.node.expr.xreplace(symbols))
            known[text] = int(found) if found.is_Integer else None
        return known[text]

    found: dict[str, tuple[int, ...]] = {}
    moving = {str(name) for name in program.exported.graph_signature.user_inputs}
    for node in program.exported.graph.nodes:
        if any(needed.name in moving for needed in node.all_input_nodes):
            moving.add(node.name)
        value = node.meta.get("val")
        if node.op != "call_function" or node.name not in moving or called(node) in _UNSET:
            continue
        if isinstance(value, Tensor) and not value.is_complex():
            shape = [concrete(size) for size in value.shape]
            if None not in shape:
                found[node.name] = tuple(size for size in shape if size is not None)
    return found


def with_outputs(program: Program, names: Sequence[str]) -> Program:
    """The program, with values of its graph as outputs more, under the names of their nodes."""
    graph, values = _copied(program.exported, {})
    own = [values[str(n)] for n in program.exported.graph_signature.user_outputs]
    return _program(program, graph, [*own, *(values[n] for n in names)], program.inputs, names)


def with_entries(program: Program, names: Sequence[str]) -> Program:
    """The program, with an input more for each of these values, which is added to it.

    The gradient of a zero that is put in there is the gradient of the value.
    """
    nodes = {node.name: node for node in program.exported.graph.nodes}
    entries = {name: nodes[name] for name in names}
    graph, values = _copied(program.exported, entries)
    own = [values[str(n)] for n in program.exported.graph_signature.user_outputs]
    more = tuple(_spec(ENTRY + name, entries[name]) for name in names)
    return _program(program, graph, own, (*program.inputs, *more), ())


def between(
    program: Program, outputs: Sequence[str], entries: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The nodes that compute some values from others, in order, and what inputs they need more."""
    nodes = {node.name: node for node in program.exported.graph.nodes}
    users = {str(name) for name in program.exported.graph_signature.user_inputs}
    taken = set(outputs)
    more: dict[str, None] = {}
    waiting = list(outputs)
    while waiting:
        for node in nodes[waiting.pop()].all_input_nodes:
            if node.name in users and node.name not in entries:
                more[node.name] = None
            elif node.name not in taken and node.name not in entries:
                taken.add(node.name)
                waiting.append(node.name)
    return [name for name in nodes if name in taken], list(more)


def cut(
    program: Program, compute: Sequence[str], entries: Sequence[str], outputs: Sequence[str]
) -> Program:
    """What computes some values of a graph from others, as a program of its own.

    Its inputs are called `ENTRY` and the node's name, its outputs as their nodes.

    Args:
        program: any.
        compute: nodes to take, in order. They need parameters, `entries` and each other;
            placeholders among them are left out.
        entries: nodes whose values become inputs; where a node is in `compute` too, those that
            need its value get the input.
        outputs: of `compute`, whose values become outputs.
    """
    nodes = {node.name: node for node in program.exported.graph.nodes}
    compute = [name for name in compute if nodes[name].op != "placeholder"]
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    taken = set(compute)
    needed = {n.name for name in compute for n in nodes[name].all_input_nodes}
    specs: list[InputSpec] = []
    for spec in program.exported.graph_signature.input_specs:
        if spec.target is not None and spec.arg.name in needed - set(entries) - taken:
            values[spec.arg.name] = graph.node_copy(nodes[spec.arg.name])
            specs.append(replace(spec, arg=TensorArgument(values[spec.arg.name].name)))
    for name in entries:
        values[name] = _entry(graph, ENTRY + name, nodes[name])
    specs += _user_inputs(values[name] for name in entries)
    made: dict[str, fx.Node] = {}
    for name in compute:
        made[name] = graph.node_copy(
            nodes[name], lambda n: values[n.name] if n.name in values else made[n.name]
        )
    results = [made[name] for name in outputs]
    graph.output(tuple(results))
    inputs = tuple(_spec(ENTRY + name, nodes[name]) for name in entries)
    targets = {spec.target for spec in specs}
    state = {k: v for k, v in program.exported.state_dict.items() if k in targets}
    exported = rebuilt(
        program.exported,
        graph,
        specs,
        outputs=list(outputs),
        arguments=[spec.name for spec in inputs],
        state=state,
    )
    return Program("forward", exported, inputs, output_specs(exported, inputs, outputs))


def _copied(
    exported: ExportedProgram, entries: Mapping[str, fx.Node]
) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A copy of a graph without its output, and its nodes by their old names."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    body = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    for node in exported.graph.find_nodes(op="placeholder"):
        values[node.name] = graph.node_copy(node)
    given = {name: _entry(graph, ENTRY + name, node) for name, node in entries.items()}
    for node in body:
        made = graph.node_copy(node, lambda n: values[n.name])
        values[node.name] = made
        if node.name in given:
            added = graph.call_function(torch.ops.aten.add.Tensor, (made, given[node.name]))
            added.meta = dict(made.meta)
            values[node.name] = added
    return graph, values


def _program(
    program: Program,
    graph: fx.Graph,
    results: Sequence[fx.Node],
    inputs: tuple[TensorSpec, ...],
    more: Sequence[str],
) -> Program:
    graph.output(tuple(results))
    names = [*(spec.name for spec in program.outputs), *more]
    signature = program.exported.graph_signature
    placeholders = list(graph.find_nodes(op="placeholder"))
    # A new graph renames placeholders that are called like a builtin of Python's: `input` is.
    specs = [
        replace(spec, arg=replace(spec.arg, name=node.name))
        for spec, node in zip(signature.input_specs, placeholders, strict=False)
    ]
    specs += _user_inputs(placeholders[len(specs) :])
    exported = rebuilt(
        program.exported,
        graph,
        specs,
        outputs=names,
        arguments=[spec.name for spec in inputs],
    )
    outputs = (*program.outputs, *output_specs(exported, inputs, names)[len(program.outputs) :])
    return Program(program.kind, exported, inputs, outputs, program.none)


def _entry(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    """An input with the shape of a node's value; contiguous, as it is passed."""
    node = graph.placeholder(name)
    value = like.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return node


def _user_inputs(nodes: Iterable[fx.Node]) -> list[InputSpec]:
    return [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in nodes]


def _spec(name: str, node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    dims = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
    return TensorSpec(name, str(value.dtype).removeprefix("torch."), dims)


def _symbols(program: Program, inputs: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
    nodes = {node.name: node for node in program.exported.graph.nodes}
    found: dict[sympy.Symbol, int] = {}
    for spec, name in zip(
        program.inputs, program.exported.graph_signature.user_inputs, strict=True
    ):
        shape = nodes[str(name)].meta["val"].shape
        for size, actual in zip(shape, inputs[spec.name].shape, strict=True):
            if isinstance(size, torch.SymInt):
                found[size.node.expr] = actual
    return found
