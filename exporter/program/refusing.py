"""Programs that refuse sizes at which they do not hold, instead of giving something else.

What they refuse of values is asserted in the captured graph: see `capture.decisions` and `.counts`.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import fx
from torch.export import ExportedProgram

from fuseport.exporter.program import Program, rebuilt
from fuseport.exporter.program.conditions import needed, summarised
from fuseport.exporter.program.matching import ASSERT
from fuseport.exporter.program.sizes._arithmetic import Step, computed, of_integers

__all__ = ["HOLDS", "asserted", "checked", "checks", "requirement", "seen", "verdicts"]

HOLDS = "the program holds only where"
"""As messages of artifacts begin, and in ONNX the names of nodes that check."""

_ASSERTIONS = torch.ops.aten._assert_scalar.default, ASSERT

T = TypeVar("T")
Conditions = tuple[sympy.Basic, ...]


def seen(conditions: Iterable[sympy.Basic]) -> tuple[Conditions, Conditions]:
    """The conditions that artifacts can check, and those of more than integers, which none does.

    Args:
        conditions: see `conditions.violated`; those that follow from others are left out.
    """
    parts = [part for condition in needed(conditions) for part in sympy.And.make_args(condition)]
    checked = tuple(part for part in parts if of_integers(part))
    return checked, tuple(part for part in parts if part not in checked)


def requirement(program: Program) -> str:
    """What artifacts say when they refuse."""
    return f"{HOLDS} {' and '.join(summarised(program.requires))}"


def verdicts(
    program: Program,
    size: Callable[[str, int], T],
    number: Callable[[int], T],
    step: Callable[[Step, T, T], T],
) -> list[T]:
    """Whether each condition of the program holds, as nodes of a graph.

    Args:
        program: with `requires`.
        size: the value of an input's dimension, by the input's name and the dimension's place.
        number: the value of an integer.
        step: what does one step.
    """
    places: dict[str, tuple[str, int]] = {}
    for spec in program.inputs:
        for i, dim in enumerate(spec.dims):
            places.setdefault(str(dim), (spec.name, i))
    symbols = {symbol for condition in program.requires for symbol in condition.free_symbols}
    values = {symbol: size(*places[str(symbol)]) for symbol in sorted(symbols, key=str)}
    return [computed(condition, values, number, step) for condition in program.requires]


def checked(program: Program) -> ExportedProgram:
    """What is captured, with assertions of `requires` before everything else."""
    exported = program.exported
    if not program.requires:
        return exported
    graph = copy.deepcopy(exported.graph)
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    user = exported.graph_signature.user_inputs
    inputs = {s.name: placeholders[str(n)] for s, n in zip(program.inputs, user, strict=True)}
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def call(target: Callable[..., Any], *arguments: Any) -> fx.Node:
        node: fx.Node = graph.call_function(target, arguments)
        node.meta["val"] = target(
            *(a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments)
        )
        return node

    said = requirement(program)
    with graph.inserting_before(first):
        for verdict in verdicts(
            program,
            lambda name, dim: call(torch.ops.aten.sym_size.int, inputs[name], dim),
            lambda number: number,
            call,
        ):
            graph.call_function(torch.ops.aten._assert_scalar.default, (verdict, said))
    graph.lint()
    return rebuilt(exported, graph, exported.graph_signature.input_specs)


def checks(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph that are there to refuse alone, sizes or values."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        said = node.args[1] if node.target in _ASSERTIONS else ""
        if str(said).startswith(HOLDS) or (node.users and found.issuperset(node.users)):
            found.add(node)
    return {node for node in found if node.op != "placeholder"}


def asserted(mark: Any, value: bool, where: str) -> None:
    """Assert, where a mark is, what the decision has to come to for a program to hold.

    Args:
        mark: of the decision, in a graph.
        value: that it has to come to.
        where: that is so, in words.
    """
    graph, held = mark.graph, mark.args[0]
    with graph.inserting_before(mark):
        if not value:
            held = graph.call_function(torch.ops.aten.logical_not.default, (held,))
            held.meta["val"] = mark.args[0].meta["val"]
        graph.call_function(ASSERT, (held, f"{HOLDS} {where}"))
