"""Axes in ONNX: of reductions, counted from the front; of sums so far, a number.

Where there is nothing to reduce and an axis is counted from the back, ONNX Runtime, 1.31 at least,
gives the shape of what it was given: of (2, 0, 8), reduced over the axis -1, that and not (2, 0).
ONNX's reference refuses CumSum along a vector of one axis, as onnxscript's `repeat_interleave` and
`logcumsumexp` have.
"""

import onnx_ir as ir

__all__ = ["from_the_front"]

_OF_POSITION = ("ArgMax", "ArgMin")
_OF_THE_SAME_SIZES = (
    "Abs", "Add", "And", "Cast", "CastLike", "Div", "Equal", "Exp", "Greater", "Identity", "IsNaN",
    "Less", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Sqrt", "Sub",
    "Where",
)  # fmt: skip


def from_the_front(model: ir.Model) -> None:
    """Have all axes so, those of reductions where the number of dimensions is known."""
    for node in tuple(model.graph.all_nodes()):
        if node.domain:
            continue
        if node.op_type in _OF_POSITION:
            axis, rank = node.attributes.get_int("axis", 0), _rank(node.inputs[0])
            if axis < 0 and rank is not None:
                node.attributes["axis"] = ir.AttrInt64("axis", axis + rank)
        elif node.op_type.startswith("Reduce"):
            _count(node)
        elif node.op_type == "CumSum":
            _make_number(node)


def _count(node: ir.Node) -> None:
    axes, rank = _axes(node), _rank(node.inputs[0])
    if rank is None or node.graph is None or all(axis >= 0 for axis in axes):
        return
    _set_axes(node, [axis % rank for axis in axes])


def _make_number(node: ir.Node) -> None:
    if (axes := _axes(node)) and _rank(node.inputs[1]) != 0:
        _set_axes(node, axes[0])


def _set_axes(node: ir.Node, axes: int | list[int]) -> None:
    assert node.graph is not None
    value = ir.tensor(axes, dtype=ir.DataType.INT64)
    constant = ir.node("Constant", [], {"value": value})
    node.graph.insert_before(node, constant)
    node.replace_input_with(1, constant.outputs[0])


def _axes(node: ir.Node) -> list[int]:
    """As they are given; none where they are not known, or all are reduced."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    maker = None if given is None else given.producer()
    if maker is not None and maker.op_type in ("Reshape", "Unsqueeze"):  # of a single one
        given = maker.inputs[0]
    known = None if given is None else ir.convenience.get_const_tensor(given)
    return [] if known is None else [int(axis) for axis in known.numpy().reshape(-1)]


def _rank(x: ir.Value | None) -> int | None:
    """torch.onnx notes sizes of what nodes of the program give, and of nothing in between."""
    if x is None:
        return None
    if x.shape is not None:
        return len(x.shape)
    if (known := ir.convenience.get_const_tensor(x)) is not None:
        return known.numpy().ndim
    node = x.producer()
    if node is None or node.domain or node.op_type not in _OF_THE_SAME_SIZES:
        return None
    ranks = [_rank(value) for value in node.inputs]
    return None if None in ranks else max(rank for rank in ranks if rank is not None)
