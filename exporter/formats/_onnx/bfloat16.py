"""Programs with bfloat16 in ONNX: operators that take it from a later opset on, or never."""

from functools import cache

import onnx.defs
import onnx_ir as ir

__all__ = ["in_float32"]

_STANDARD = ("", "ai.onnx")


def in_float32(model: ir.Model) -> None:
    """Compute in float32 what the model's opset has no bfloat16 for, and round the results.

    So torch does inside these operators: Conv and InstanceNormalization before opset 22, Sin, …
    """
    opset = model.opset_imports[""]
    for node in tuple(model.graph.all_nodes()):
        if node.domain in _STANDARD:
            _widen(node, opset)


def _widen(node: ir.Node, opset: int) -> None:
    def narrow(value: ir.Value | None) -> bool:
        return value is not None and _dtype(value, opset) == ir.DataType.BFLOAT16

    inputs, outputs = _without_bfloat16(node.op_type, opset)
    last = max(inputs, default=-1)
    here = [i for i, v in enumerate(node.inputs) if min(i, last) in inputs and narrow(v)]
    graph = node.graph
    if not here or graph is None:
        return
    results = [value for i, value in enumerate(node.outputs) if i in outputs and narrow(value)]
    for i in here:
        value = node.inputs[i]
        assert value is not None
        cast = _cast(value, ir.DataType.FLOAT)
        graph.insert_before(node, cast)
        node.replace_input_with(i, cast.outputs[0])
    for value in results:
        cast = _cast(value, ir.DataType.BFLOAT16)
        rounded = cast.outputs[0]
        ir.convenience.replace_all_uses_with(value, rounded, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        graph.insert_after(node, cast)
        rounded.name, value.name = value.name, f"{value.name}_wide"
        value.dtype = ir.DataType.FLOAT


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": dtype})
    node.outputs[0].dtype, node.outputs[0].shape = dtype, value.shape
    return node


def _dtype(value: ir.Value, opset: int) -> ir.DataType | None:
    """As noted, or, of what torch.onnx puts between, as the inputs of its operator tell."""
    node = value.producer()
    if value.dtype is not None or node is None or node.domain not in _STANDARD:
        return value.dtype
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "CastLike":
        same = [1]
    else:
        schema = onnx.defs.get_schema(node.op_type, opset)
        of_value = schema.outputs[min(value.index() or 0, len(schema.outputs) - 1)].type_str
        same = [i for i, formal in enumerate(schema.inputs) if formal.type_str == of_value]
    given = node.inputs[same[0]] if same and same[0] < len(node.inputs) else None
    return None if given is None else _dtype(given, opset)


@cache
def _without_bfloat16(op_type: str, opset: int) -> tuple[frozenset[int], frozenset[int]]:
    """Which inputs and outputs of an operator, by position, are of types without bfloat16.

    Those alone that may be float32 as well; the last input is that of all that follow.
    """
    schema = onnx.defs.get_schema(op_type, opset)
    allowed = {
        constraint.type_param_str: set(constraint.allowed_type_strs)
        for constraint in schema.type_constraints
    }
    narrow = {
        name
        for name, types in allowed.items()
        if "tensor(float)" in types and "tensor(bfloat16)" not in types
    }
    return (
        frozenset(i for i, formal in enumerate(schema.inputs) if formal.type_str in narrow),
        frozenset(i for i, formal in enumerate(schema.outputs) if formal.type_str in narrow),
    )
