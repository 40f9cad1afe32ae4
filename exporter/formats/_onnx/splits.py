"""What splits a tensor in ONNX: into tensors, where torch.onnx makes a sequence and takes it apart.

A sequence of bfloat16 there is none of, in any opset, and ONNX Runtime copies what is in one.
"""

import onnx_ir as ir

__all__ = ["without_sequences"]


def without_sequences(model: ir.Model) -> None:
    """`Split` for each `SplitToSequence` whose parts are known and taken one by one."""
    for node in tuple(model.graph.all_nodes()):
        if node.op_type == "SplitToSequence":
            _split(node)


def _split(node: ir.Node) -> None:
    whole, graph = node.inputs[0], node.graph
    takers = [taker for taker, _ in node.outputs[0].uses()]
    places = [_number(taker.inputs[1]) for taker in takers if taker.op_type == "SequenceAt"]
    keepdims = node.attributes.get_int("keepdims", 1)
    if graph is None or whole is None or not keepdims or len(places) < len(takers):
        return
    axis = node.attributes.get_int("axis", 0)
    sizes = _sizes(node, None if whole.shape is None else whole.shape[axis])
    if sizes is None or not all(p is not None and -len(sizes) <= p < len(sizes) for p in places):
        return
    given = ir.node("Constant", [], {"value": ir.tensor(sizes, dtype=ir.DataType.INT64)})
    split = ir.node("Split", [whole, given.outputs[0]], {"axis": axis}, num_outputs=len(sizes))
    for value in split.outputs:
        value.type = whole.type
    graph.insert_before(node, (given, split))
    for taker, place in zip(takers, places, strict=True):
        assert place is not None
        old, new = taker.outputs[0], split.outputs[place]
        new.shape = old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if taker.graph is not None:
            taker.graph.remove(taker, safe=True)
    graph.remove(node, safe=True)


def _sizes(node: ir.Node, whole: ir.SymbolicDim | int | None) -> list[int] | None:
    """Of the parts, if they are known; the last one of equal ones may be smaller."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    known = None if given is None else ir.convenience.get_const_tensor(given)
    if known is None:
        return None
    numbers = known.numpy()
    if numbers.ndim:
        return [int(size) for size in numbers]
    size = int(numbers)
    if not isinstance(whole, int) or size < 1:
        return None
    return [min(size, whole - start) for start in range(0, whole, size)]


def _number(value: ir.Value | None) -> int | None:
    known = None if value is None else ir.convenience.get_const_tensor(value)
    return None if known is None else int(known.numpy())
