"""ONNX models that refuse sizes at which their program does not hold.

ONNX has no assertion. Where a condition does not hold, the shape that an input is given, its own,
is taken from a place that there is none of, by a node whose name says what must be so.
"""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from fuseport.exporter.program import Program
from fuseport.exporter.program._arithmetic import Step
from fuseport.exporter.program.refusing import requirement, verdicts

__all__ = ["refuse"]

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
