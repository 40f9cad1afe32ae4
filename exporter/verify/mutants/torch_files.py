"""Wrong files of torch.export and TorchScript, made of a right exported program."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.formats import DEFAULT_OPSET, Options, torchscript
from fuseport.exporter.program import Program, TensorSpec, rebuilt
from fuseport.exporter.program.refusing import checks
from fuseport.exporter.runtimes._ops import register
from fuseport.exporter.verify.mutants.files import WEIGHTS, Asked, Made

__all__ = ["made", "made_torchscript"]

Node = fx.Node
aten = torch.ops.aten


def made(asked: Asked) -> Iterator[Made]:
    """See `files.Maker`: `.pt2` files."""

    def write(make: Callable[[], ExportedProgram], path: Path) -> None:
        torch.export.save(make(), path)

    for kind, place, make, _ in _programs(asked, asked.artifact):
        yield Made(kind, place, partial(write, make))


def made_torchscript(asked: Asked) -> Iterator[Made]:
    """The same for `.pt` files, written anew from the bundle's exported program."""
    if asked.source is None:
        return
    described = {
        which: tuple(
            TensorSpec(s["name"], s["dtype"], tuple(s["dims"]), s.get("high"))
            for s in asked.program[which]
        )
        for which in ("inputs", "outputs")
    }

    def write(make: Callable[[], ExportedProgram], dropped: str | None, path: Path) -> None:
        outputs = tuple(s for s in described["outputs"] if s.name != dropped)
        kind = asked.program["kind"]
        program = Program(kind, make(), described["inputs"], outputs)
        torchscript.write(program, path, Options(path, DEFAULT_OPSET))

    for kind, place, make, dropped in _programs(asked, asked.source):
        yield Made(kind, place, partial(write, make, dropped))


Described = tuple[str, str, Callable[[], ExportedProgram], str | None]


def _programs(asked: Asked, file: Path) -> Iterator[Described]:
    """Kind, place, what makes the wrong program, and the output that it has not."""
    register(asked.program)
    right = torch.export.load(file)
    names = [spec["name"] for spec in asked.program["outputs"]]
    state = right.state_dict
    for kind, (_, holds, edit) in WEIGHTS.items():
        fitting = [n for n, t in state.items() if t.is_floating_point() and holds(t.detach())]
        for name in asked.drawn(fitting, kind):
            yield kind, name, partial(_reweighted, right, name, edit), None
    floating = [s["name"] for s in asked.program["outputs"] if "float" in s["dtype"]]
    for kind, op in _OUTPUTS.items():
        for name in asked.drawn(floating, kind):
            yield kind, name, partial(_behind, right, names.index(name), op), None
    if len(names) > 1:
        for name in asked.drawn(names, "output dropped"):
            kept = [n for n in names if n != name]
            yield "output dropped", name, partial(_kept, right, names, kept), name
        for one, other in asked.drawn(_pairs(right, names), "outputs swapped"):
            order = [{one: other, other: one}.get(n, n) for n in names]
            make = partial(_kept, right, names, order, names)
            yield "outputs swapped", f"{one} and {other}", make, None
    others = checks(right.graph)
    for kind, (fits, change) in _NODES.items():
        fitting = [n.name for n in right.graph.nodes if n not in others and fits(n)]
        for name in asked.drawn(fitting, kind):
            node = next(n for n in right.graph.nodes if n.name == name)
            yield kind, f"{_target(node)} to {name}", partial(_edited, right, name, change), None


def _again(right: ExportedProgram, graph: fx.Graph, **other: Any) -> ExportedProgram:
    graph.lint()
    return rebuilt(right, graph, right.graph_signature.input_specs, **other)


def _reweighted(
    right: ExportedProgram, name: str, edit: Callable[[Tensor], Tensor]
) -> ExportedProgram:
    old = right.state_dict[name]
    new: Any = edit(old.detach())
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, old.requires_grad)
    return _again(right, copy.deepcopy(right.graph), state={**right.state_dict, name: new})


def _behind(
    right: ExportedProgram, index: int, op: Callable[[fx.Graph, Node], Node]
) -> ExportedProgram:
    graph = copy.deepcopy(right.graph)
    output = graph.output_node()
    results = list(output.args[0])
    with graph.inserting_before(output):
        results[index] = op(graph, results[index])
    output.args = (tuple(results),)
    return _again(right, graph)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Node, **kwargs: Any) -> Node:
    """A node whose result looks as that of another."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = like.meta["val"].to(kwargs["dtype"]) if kwargs else like.meta["val"]
    return node


def _times(factor: float) -> Callable[[fx.Graph, Node], Node]:
    return lambda graph, node: _call(graph, aten.mul.Tensor, (node, factor), node)


def _through_half(graph: fx.Graph, node: Node) -> Node:
    to = aten._to_copy.default
    half = _call(graph, to, (node,), node, dtype=torch.float16)
    return _call(graph, to, (half,), half, dtype=node.meta["val"].dtype)


_OUTPUTS: Mapping[str, Callable[[fx.Graph, Node], Node]] = {
    "output's sign": _times(-1.0),
    "output zero": _times(0.0),
    "output off by 0.1 %": _times(1.001),
    "output cast to half": _through_half,
}


def _kept(
    right: ExportedProgram, names: list[str], order: list[str], called: list[str] | None = None
) -> ExportedProgram:
    """Some outputs, in an order, under names: their own, if none are given."""
    graph = copy.deepcopy(right.graph)
    output = graph.output_node()
    by_name = dict(zip(names, output.args[0], strict=True))
    output.args = (tuple(by_name[name] for name in order),)
    return _again(right, graph, outputs=called or order)


def _pairs(right: ExportedProgram, names: list[str]) -> list[tuple[str, str]]:
    """Outputs that look alike; any, where no two do."""
    results: Any = right.graph.output_node().args[0]
    facts = {
        name: (str(tuple(node.meta["val"].shape)), node.meta["val"].dtype)
        for name, node in zip(names, results, strict=True)
    }
    every = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return [pair for pair in every if facts[pair[0]] == facts[pair[1]]] or every


def _edited(
    right: ExportedProgram, name: str, change: Callable[[fx.Graph, Node], None]
) -> ExportedProgram:
    graph = copy.deepcopy(right.graph)
    change(graph, next(node for node in graph.nodes if node.name == name))
    return _again(right, graph)


def _target(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is(*targets: Any) -> Callable[[Node], bool]:
    return lambda node: node.target in targets and _floats(node)


def _floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _alike(node: Node, one: int) -> bool:
    """Whether an argument looks as the result does, so that it can stand for it."""
    if not _floats(node) or len(node.args) <= one or not isinstance(node.args[one], Node):
        return False
    value, mine = node.args[one].meta.get("val"), node.meta["val"]  # type: ignore[union-attr]
    return isinstance(value, Tensor) and value.shape == mine.shape and value.dtype == mine.dtype


def _argument(index: int) -> Callable[[fx.Graph, Node], None]:
    def change(graph: fx.Graph, node: Node) -> None:
        node.replace_all_uses_with(node.args[index])  # type: ignore[arg-type]
        graph.erase_node(node)

    return change


_OTHER = {
    aten.sigmoid.default: aten.hardsigmoid.default,
    aten.silu.default: aten.hardswish.default,
    aten.softplus.default: aten.relu.default,
    aten.relu.default: aten.leaky_relu.default,
    aten.tanh.default: aten.hardtanh.default,
    aten.exp.default: aten.expm1.default,
    aten.rsqrt.default: aten.reciprocal.default,
    aten.add.Tensor: aten.sub.Tensor,
    aten.sub.Tensor: aten.add.Tensor,
    aten.cos.default: aten.sin.default,
}
_TERMS = (aten.add.Tensor, aten.sub.Tensor)
_FACTORS = (aten.mul.Tensor, aten.div.Tensor)


def _other(graph: fx.Graph, node: Node) -> None:
    node.target = _OTHER[node.target]  # type: ignore[index]


def _swap(graph: fx.Graph, node: Node) -> None:
    first, second, *rest = node.args
    node.args = (second, first, *rest)


def _number(node: Node) -> int | None:
    """Which argument is a floating number other than 0 and 1."""
    found = (i for i, a in enumerate(node.args) if isinstance(a, float) and a not in (0.0, 1.0))
    return next(found, None) if isinstance(node.target, torch._ops.OpOverload) else None


def _number_off(graph: fx.Graph, node: Node) -> None:
    index = _number(node)
    assert index is not None
    value: Any = node.args[index]
    factor = 10.0 if abs(value) < 1e-2 else 1.01
    node.update_arg(index, value * factor)


def _half(graph: fx.Graph, node: Node) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        half = _call(graph, aten._to_copy.default, (node,), node, dtype=torch.float16)
    with graph.inserting_after(half):
        to = node.meta["val"].dtype
        back = _call(graph, aten._to_copy.default, (half,), half, dtype=to)
    for user in users:
        user.replace_input_with(node, back)


def _likes(node: Node) -> tuple[int, int] | None:
    """Two arguments of a fused op that look alike, such as B and C."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name.startswith(("aten::", "prims::")) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    facts = [
        (str(tuple(a.meta["val"].shape)), a.meta["val"].dtype)
        if isinstance(a, Node) and isinstance(a.meta.get("val"), Tensor)
        else None
        for a in node.args
    ]
    pairs = [
        (i, j)
        for i, one in enumerate(facts)
        for j, other in enumerate(facts[i + 1 :], i + 1)
        if one is not None and one == other and node.args[i] is not node.args[j]
    ]
    return pairs[-1] if pairs else None


def _crossed(graph: fx.Graph, node: Node) -> None:
    pair = _likes(node)
    assert pair is not None
    one, other = node.args[pair[0]], node.args[pair[1]]
    node.update_arg(pair[0], other)
    node.update_arg(pair[1], one)


def _result(node: Node) -> bool:
    """One of several results of an operator, whose neighbour looks the same."""
    return node.target is operator.getitem and _neighbour(node) is not None


def _neighbour(node: Node) -> Node | None:
    owner, index = node.args
    assert isinstance(owner, Node)
    mine = node.meta.get("val")
    for other in owner.users:
        theirs = other.meta.get("val")
        if (
            other.target is operator.getitem
            and other.args[1] != index
            and isinstance(mine, Tensor)
            and isinstance(theirs, Tensor)
            and mine.shape == theirs.shape
            and mine.dtype == theirs.dtype
        ):
            return other
    return None


def _another_result(graph: fx.Graph, node: Node) -> None:
    other = _neighbour(node)
    assert other is not None
    node.update_arg(1, other.args[1])


def _sized(node: Node) -> bool:
    value = node.meta.get("val")
    return node.target is aten.sym_size.int and getattr(value, "node", None) is not None


def _baked(graph: fx.Graph, node: Node) -> None:
    hint = int(node.meta["val"].node.hint)
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda a: hint if a is node else a)
        user.kwargs = fx.map_arg(user.kwargs, lambda a: hint if a is node else a)
    graph.erase_node(node)


def _axis(node: Node) -> int | None:
    """Which argument is an axis that has a neighbour of the same meaning."""
    if node.target in (aten.softmax.int, aten._softmax.default, aten._log_softmax.default,
                       aten.cumsum.default, aten.flip.default):  # fmt: skip
        return 1
    return None


def _other_axis(graph: fx.Graph, node: Node) -> None:
    axis: Any = node.args[1]
    moved = [a - 1 for a in axis] if isinstance(axis, (list, tuple)) else axis - 1
    node.update_arg(1, moved)


_NODES: dict[str, tuple[Callable[[Node], bool], Callable[[fx.Graph, Node], None]]] = {
    "file: wrong constant": (lambda n: _number(n) is not None, _number_off),
    "file: missing term": (lambda n: _is(*_TERMS)(n) and _alike(n, 0), _argument(0)),
    "file: missing first term": (
        lambda n: _is(aten.add.Tensor)(n) and _alike(n, 1),
        _argument(1),
    ),
    "file: missing factor": (lambda n: _is(*_FACTORS)(n) and _alike(n, 0), _argument(0)),
    "file: another operator": (_is(*_OTHER), _other),
    "file: swapped operands": (
        lambda n: (
            (_is(aten.sub.Tensor, aten.div.Tensor)(n) and _alike(n, 0) and _alike(n, 1))
            or (_likes(n) is not None)
        ),
        lambda g, n: _swap(g, n) if n.target in (*_TERMS, *_FACTORS) else _crossed(g, n),
    ),
    "file: another axis": (lambda n: _axis(n) is not None, _other_axis),
    "file: rounded to half": (
        lambda n: n.op == "call_function" and _floats(n) and bool(n.users),
        _half,
    ),
    "file: swapped results": (_result, _another_result),
    "size baked in": (_sized, _baked),
}
"""Edits of one node, by kind: which nodes they fit, and the edit."""
