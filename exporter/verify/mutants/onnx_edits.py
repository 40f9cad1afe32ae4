"""Mistakes in ONNX: edits of one node, in the bodies of an op's nodes or in a file's graph."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import onnx
from onnx import helper, numpy_helper

from fuseport.exporter.program.refusing import HOLDS
from fuseport.exporter.verify.mutants.kinds import Kind, Mutant
from fuseport.ops.lowering import Bodies, Lowering
from fuseport.ops.spec import OpSpec

__all__ = ["BODIES", "EDITS", "Edit", "applied", "bodies", "planted", "sites"]

_PLACES = 2  # of a kind in one function, drawn; a body can have a hundred nodes

Nodes = Any
"""A repeated field of nodes: of a graph, a function, or the body of a loop."""


@dataclass(frozen=True)
class Edit:
    """A mistake in one node.

    Attributes:
        description: in words.
        fits: whether a node can have it.
        apply: makes it, in place, in the node of that number.
        source: published code that made it.
    """

    description: str
    fits: Callable[[onnx.NodeProto], bool]
    apply: Callable[[Nodes, int], None]
    source: str = ""


def _of(*types: str) -> Callable[[onnx.NodeProto], bool]:
    return lambda node: node.op_type in types and node.domain in ("", "ai.onnx")


def _first_alone(nodes: Nodes, at: int) -> None:
    node = nodes[at]
    nodes[at].CopyFrom(helper.make_node("Identity", [node.input[0]], list(node.output)))


def _second_alone(nodes: Nodes, at: int) -> None:
    node = nodes[at]
    nodes[at].CopyFrom(helper.make_node("Identity", [node.input[1]], list(node.output)))


def _swapped(nodes: Nodes, at: int) -> None:
    one, other = nodes[at].input[:2]
    nodes[at].input[0], nodes[at].input[1] = other, one


_OTHER = {
    "Sigmoid": "HardSigmoid",
    "Softplus": "Relu",
    "Relu": "LeakyRelu",
    "Erf": "Tanh",
    "Tanh": "HardSigmoid",
    "Add": "Sub",
    "Sub": "Add",
    "ReduceSum": "ReduceMean",
    "ReduceMean": "ReduceSum",
    "Max": "Min",
    "Less": "Greater",
    "Softmax": "LogSoftmax",
    "Floor": "Ceil",
}


def _other_operator(nodes: Nodes, at: int) -> None:
    node = nodes[at]
    node.op_type = _OTHER[node.op_type]


def _scalar(node: onnx.NodeProto) -> numpy.ndarray[Any, Any] | None:
    """The value of a floating constant of one element that is neither 0 nor infinite."""
    if node.op_type != "Constant":
        return None
    for attribute in node.attribute:
        value = None
        if attribute.name == "value":
            value = numpy_helper.to_array(attribute.t)
        elif attribute.name == "value_float":
            value = numpy.asarray(attribute.f, numpy.float32)
        if value is not None and value.size == 1 and value.dtype.kind == "f":
            number = float(value.reshape(()))
            return value if number and abs(number) < 1e4 else None
    return None


def _constant_off(nodes: Nodes, at: int) -> None:
    node = nodes[at]
    value = _scalar(node)
    assert value is not None
    # An epsilon 1 % off is none that anyone would see; a wrong one is another power of ten.
    factor = 10.0 if abs(float(value.reshape(()))) < 1e-2 else 1.01
    tensor = numpy_helper.from_array((value * factor).astype(value.dtype))
    nodes[at].CopyFrom(helper.make_node("Constant", [], list(node.output), value=tensor))


def _axis(node: onnx.NodeProto) -> onnx.AttributeProto | None:
    return next((a for a in node.attribute if a.name == "axis"), None)


def _other_axis(nodes: Nodes, at: int) -> None:
    attribute = _axis(nodes[at])
    assert attribute is not None
    attribute.i += -1 if attribute.i > 0 or attribute.i == -1 else 1


def _in_half(nodes: Nodes, at: int) -> None:
    """Rounds what a node gives: to float16, and back to the type of its first input."""
    node = nodes[at]
    result, given = node.output[0], node.input[0]
    node.output[0] = f"{result}_exact"
    half = helper.make_node("Cast", [f"{result}_exact"], [f"{result}_half"], to=10)
    back = helper.make_node("CastLike", [f"{result}_half", given], [result])
    nodes.insert(at + 1, half)
    nodes.insert(at + 2, back)


def _outputs_swapped(nodes: Nodes, at: int) -> None:
    one, other = nodes[at].output[:2]
    nodes[at].output[0], nodes[at].output[1] = other, one


def _reduction(node: onnx.NodeProto) -> str:
    found = [a.s.decode() for a in node.attribute if a.name == "reduction"]
    return found[0] if found else "none"


def _other_reduction(nodes: Nodes, at: int) -> None:
    node = nodes[at]
    other = "add" if _reduction(node) == "none" else "none"
    kept = [a for a in node.attribute if a.name != "reduction"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("reduction", other)])


def _eps(node: onnx.NodeProto) -> onnx.AttributeProto | None:
    return next((a for a in node.attribute if a.name == "epsilon"), None)


def _other_eps(nodes: Nodes, at: int) -> None:
    attribute = _eps(nodes[at])
    assert attribute is not None
    attribute.f *= 10


def _gelu(nodes: Nodes, at: int) -> None:
    node = nodes[at]
    kept = [a for a in node.attribute if a.name != "approximate"]
    exact = any(a.s == b"tanh" for a in node.attribute if a.name == "approximate")
    del node.attribute[:]
    node.attribute.extend(
        [*kept, helper.make_attribute("approximate", "none" if exact else "tanh")]
    )


_FLOATING = ("Exp", "Sigmoid", "Softplus", "Sqrt", "Tanh", "MatMul", "Einsum", "Erf", "Log", "Gemm")

EDITS: dict[str, Edit] = {
    "wrong constant": Edit(
        "a constant is 1 % off, or an epsilon ten times what it was",
        lambda node: _scalar(node) is not None,
        _constant_off,
    ),
    "missing term": Edit("of a sum the first term is left", _of("Add", "Sub"), _first_alone),
    "missing first term": Edit("of a sum the second term is left", _of("Add"), _second_alone),
    "missing factor": Edit(
        "of a product or quotient the first factor is left", _of("Mul", "Div"), _first_alone
    ),
    "another operator": Edit(
        "an operator is one like it: Sub for Add, the mean for the sum, HardSigmoid for Sigmoid",
        _of(*_OTHER),
        _other_operator,
    ),
    "swapped operands": Edit(
        "the operands of Sub, Div, MatMul, Pow or Less are swapped",
        lambda node: (
            _of("Sub", "Div", "MatMul", "Pow", "Less")(node) and node.input[0] != node.input[1]
        ),
        _swapped,
    ),
    "another axis": Edit("an axis is its neighbour", lambda n: _axis(n) is not None, _other_axis),
    "rounded to half": Edit("a value is cast to float16 and back", _of(*_FLOATING), _in_half),
    "swapped results": Edit(
        "two results of a node are swapped",
        lambda node: len([o for o in node.output if o]) > 1,
        _outputs_swapped,
    ),
    "scatter adds": Edit(
        "ScatterND or ScatterElements adds where it replaced, or the reverse",
        _of("ScatterND", "ScatterElements"),
        _other_reduction,
    ),
    "another epsilon": Edit(
        "a norm's epsilon is ten times what it was", lambda n: _eps(n) is not None, _other_eps
    ),
    "another Gelu": Edit("Gelu by tanh for that by erf, or the reverse", _of("Gelu"), _gelu),
}
"""By name."""

BODIES = tuple(
    Kind(f"body: {name}", edit.description, "lowering", ("onnx",)) for name, edit in EDITS.items()
)


def sites(
    nodes: Nodes, results: Iterable[str], edit: Edit, path: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """The nodes that an edit fits and that results come of, in bodies of loops and branches too.

    Each by its numbers: of the node in the outermost list, of the attribute, of the node there.
    """
    used = _used(nodes, set(results))
    for number, node in enumerate(nodes):
        if used.isdisjoint(node.output) or node.name.startswith(HOLDS):
            # A body can have nodes that another one needs, which is made of the same text; and what
            # checks is seen at other sizes and values than those that are compared.
            continue
        if edit.fits(node):
            yield (*path, number)
        for which, attribute in enumerate(node.attribute):
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = [value.name for value in attribute.g.output]
                yield from sites(attribute.g.node, inner, edit, (*path, number, which))


def _used(nodes: Nodes, results: set[str]) -> set[str]:
    """The values that results are computed from, and themselves; not those of what is checked."""
    used = set(results)
    for node in reversed(nodes):
        if not used.isdisjoint(node.output):
            # Of what checks, the Reshape has values to pass on.
            checks = node.name.startswith(HOLDS)
            used.update(node.input[: int(node.op_type == "Reshape")] if checks else node.input)
            for attribute in node.attribute:
                inner = {value.name for value in attribute.g.output}
                used |= _used(attribute.g.node, inner)
    return used


def applied(nodes: Nodes, edit: Edit, site: Sequence[int]) -> str:
    """Make an edit in place; the node's words."""
    *outer, last = site
    while outer:
        number, which, *outer = outer
        nodes = nodes[number].attribute[which].g.node
    words = f"{nodes[last].op_type} to {nodes[last].output[0]}"
    edit.apply(nodes, last)
    return words


def bodies(spec: OpSpec, opset: int, seed: int, everywhere: bool) -> Iterator[Mutant]:
    """Mutants of the bodies of an op's nodes.

    Args:
        spec: of the op.
        opset: of the bodies.
        seed: of the places drawn.
        everywhere: up to two places in each function; one of the op, if not.
    """
    if not spec.lowers:
        return
    functions = list(spec.lowering().functions(opset))
    for kind, edit in zip(BODIES, EDITS.values(), strict=True):
        draw = random.Random(f"{seed} {kind.name}")
        found = [
            (function.name, site)
            for function in functions
            for site in _drawn(list(sites(function.node, function.output, edit)), draw)
        ]
        for name, site in found if everywhere else draw.sample(found, min(1, len(found))):
            function = copy.deepcopy(next(f for f in functions if f.name == name))
            words = applied(function.node, edit, site)
            place = f"{words} at {'.'.join(map(str, site))}"
            yield Mutant(spec.name, kind, name, place)


def planted(spec: OpSpec, mutant: Mutant) -> OpSpec:
    """The op with a mutant of `bodies` in its lowering."""
    site = tuple(map(int, mutant.place.rpartition(" at ")[2].split(".")))
    edit = EDITS[mutant.kind.name.removeprefix("body: ")]
    return replace(spec, onnx=_Edited(spec.lowering(), mutant.operator, edit, site))


class _Edited(Bodies):
    """The bodies of a lowering, one of them edited."""

    def __init__(self, right: Lowering, name: str, edit: Edit, site: Sequence[int]) -> None:
        super().__init__(right.DOMAIN, (), right.VERSION)
        object.__setattr__(self, "parts", (right, name, edit, site))

    def of(self, spec: OpSpec) -> Lowering:
        return _EditedLowering(*self.parts)  # type: ignore[attr-defined]


class _EditedLowering:
    def __init__(self, right: Lowering, name: str, edit: Edit, site: Sequence[int]) -> None:
        self.DOMAIN = right.DOMAIN
        self.VERSION = right.VERSION
        self.decompositions = right.decompositions
        self._right = right
        self._name = name
        self._edit = edit
        self._site = site

    def functions(self, opset: int) -> list[onnx.FunctionProto]:
        found = [copy.deepcopy(function) for function in self._right.functions(opset)]
        [function] = [function for function in found if function.name == self._name]
        applied(function.node, self._edit, self._site)
        return found


def _drawn(found: list[Any], draw: random.Random) -> list[Any]:
    return draw.sample(found, min(_PLACES, len(found)))
