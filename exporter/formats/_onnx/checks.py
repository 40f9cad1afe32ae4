"""ONNX models that refuse what their program does not hold for: sizes, and values.

ONNX has no assertion. Where a condition does not hold, the shape that an input is given, its own,
is taken from a place that there is none of, by a node whose name says what must be so. Where one on
values does not, it is the shape of an output.
"""

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from fuseport.exporter.program import Program, rebuilt
from fuseport.exporter.program.matching import ASSERT
from fuseport.exporter.program.refusing import requirement, verdicts
from fuseport.exporter.program.sizes._arithmetic import Step

__all__ = ["refuse", "refuse_values", "returning_conditions"]

_OPERATORS: Mapping[Step, str] = {
    operator.add: "Add",
    operator.mul: "Mul",
    operator.mod: "Mod",
    torch.sym_min: "Min",
    torch.sym_max: "Max",
    operator.eq: "Equal",
    operator.lt: "Less",
    operator.le: "LessOrEqual",
    operator.gt: "Greater",
    operator.ge: "GreaterOrEqual",
}


def refuse(model: ir.Model, program: Program) -> None:
    """Let `model` fail where what `program` requires is not so."""
    if not program.requires:
        return
    inputs = {str(value.name): value for value in model.graph.inputs}
    nodes: list[ir.Node] = []

    def call(kind: str, *values: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(kind, values, attributes))
        return nodes[-1].outputs[0]

    def number(value: Any) -> ir.Value:
        return call("Constant", value=ir.tensor(value, dtype=ir.DataType.INT64))

    def size(name: str, dim: int) -> ir.Value:
        return call("Squeeze", call("Shape", inputs[name], start=dim, end=dim + 1))

    def step(of: Step, a: ir.Value, b: ir.Value) -> ir.Value:
        if of is operator.ne:
            return call("Not", call("Equal", a, b))
        if of is operator.floordiv:  # Div rounds towards zero
            return call("Div", call("Sub", a, call("Mod", a, b)), b)
        return call(_OPERATORS[of], a, b)

    held = functools.reduce(functools.partial(call, "And"), verdicts(program, size, number, step))
    wrong = call("Cast", call("Not", held), to=ir.DataType.INT64)
    first = next(value for value in inputs.values() if value.shape)
    others = [use for use in first.uses() if use.node not in nodes]
    own = number([[0] * len(first.shape or ())])  # 0: the dimension as it is
    shape = call("Gather", own, wrong)
    given = call("Reshape", first, shape)
    given.type, given.shape = first.type, first.shape
    said = requirement(program)
    for i, node in enumerate(nodes):
        node.name = said if node is shape.producer() else f"{said}, {i}"
    for use in others:
        use.node.replace_input_with(use.idx, given)
    begin = model.graph[0]
    model.graph.insert_before(begin, nodes)


def returning_conditions(exported: ExportedProgram) -> tuple[ExportedProgram, list[str]]:
    """A program that returns what it asserts of values, behind its outputs, and does not assert it.

    Returns:
        The program, and the message of each assertion.
    """
    if not exported.graph.find_nodes(op="call_function", target=ASSERT):
        return exported, []
    graph = copy.deepcopy(exported.graph)
    output, messages = graph.output_node(), []
    results: Any = output.args[0]
    for node in graph.find_nodes(op="call_function", target=ASSERT):
        condition, said = node.args
        with graph.inserting_before(node):
            held = graph.call_function(torch.ops.aten.clone.default, (condition,))
        held.meta["val"] = condition.meta["val"]
        results = (*results, held)
        messages.append(said)
        graph.erase_node(node)
    output.args = (results,)
    names = [f"output {i}" for i in range(len(results))]
    inputs = exported.graph_signature.input_specs
    return rebuilt(exported, graph, inputs, outputs=names), messages


def refuse_values(model: ir.Model, messages: Sequence[str]) -> None:
    """Let `model`, of a program that returns conditions, fail where one does not hold instead."""
    graph = model.graph
    count = len(graph.outputs) - len(messages)
    held = graph.outputs[count:]
    del graph.outputs[count:]

    def call(kind: str, *values: ir.Value, named: str | None = None, **attributes: Any) -> ir.Value:
        graph.append(ir.node(kind, values, attributes, name=named))
        return graph[-1].outputs[0]

    def number(value: Any) -> ir.Value:
        return call("Constant", value=ir.tensor(value, dtype=ir.DataType.INT64))

    for condition, said in zip(held, messages, strict=True):
        result = graph.outputs[0]
        rank = len(result.shape or ())
        wrong = call("Cast", call("Not", condition), to=ir.DataType.INT64)
        # A Gather on a GPU gives zeros there: then the Reshape fails, by a size that is none.
        own = call("Gather", number([[0] * rank or [1]]), wrong, named=said)
        shape = call("Sub", own, call("Mul", wrong, number(2)))
        given = call("Reshape", result, shape, named=f"{said}, so")
        if not rank:
            given = call("Squeeze", given)
        given.type, given.shape = result.type, result.shape
        graph.outputs[0] = given
