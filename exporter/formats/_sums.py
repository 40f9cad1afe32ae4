"""Sums in ONNX that keep what float32 holds: over one axis at a time, and a long one in blocks.

A runtime adds up in the order that it finds numbers. ONNX Runtime takes those of several axes one
after another: of a volume of 65 × 65 × 65 its mean is off by a hundred roundings, and the gradient
of a bias by more. Over one axis after another the sums are short, take about the same time, and are
off by a few. It adds rows one after another, too: of 40,000 rows, as the gradient of a linear
layer's bias has them, the sum is off by 250 times the square root of their number in roundings.
In blocks it is by a tenth of that.
"""

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from fuseport.exporter.program.rewriting import Table

__all__ = ["in_blocks", "of_volume", "one_axis_at_a_time"]

aten = torch.ops.aten

_REDUCTIONS = ("ReduceSum", "ReduceMean")
_OF_ITS_DTYPE = ("Abs", "Add", "Div", "Exp", "Mul", "Neg", "Pow", "Sqrt", "Sub", *_REDUCTIONS)


def one_axis_at_a_time(model: ir.Model) -> None:
    """A chain of sums, or means, for each one of float32 over several axes."""
    for node in tuple(model.graph.all_nodes()):
        if node.op_type in _REDUCTIONS and not node.domain:
            _chain(node)


def _chain(node: ir.Node) -> None:
    x, graph = node.inputs[0], node.graph
    if x is None or graph is None or _dtype(x) != ir.DataType.FLOAT:
        return
    axes, sizes = _axes(node), _sizes(x)
    keepdims = node.attributes.get_int("keepdims", 1)
    # From the last axis on, so that those before keep their numbers; what has one element only
    # goes with it.
    ones = [axis for axis in axes if sizes is not None and sizes[axis] == 1]
    long = [axis for axis in axes if axis not in ones]
    if len(long) < 2:
        return
    gone = [] if keepdims else ones
    groups = [[*ones, long[-1]], *([a - sum(o < a for o in gone)] for a in reversed(long[:-1]))]
    for group in groups[:-1]:
        constant = _constant(group)
        part = ir.node(
            node.op_type, [x, constant.outputs[0]], {"keepdims": keepdims}, version=node.version
        )
        x = part.outputs[0]
        x.dtype = ir.DataType.FLOAT
        if sizes is not None:
            sizes = _reduced(sizes, group, keepdims)
            x.shape = ir.Shape(sizes)
        graph.insert_before(node, (constant, part))
    constant = _constant(groups[-1])
    graph.insert_before(node, constant)
    node.resize_inputs(2)
    for index, value in enumerate((x, constant.outputs[0])):
        node.replace_input_with(index, value)


def in_blocks(model: ir.Model) -> None:
    """Add up many rows of float32 in blocks, which are added up then."""
    for node in tuple(model.graph.all_nodes()):
        if node.op_type in _REDUCTIONS and not node.domain:
            _block(node)


_FEW = 512  # rows, whose sum is off by no more than those of a block


def _block(node: ir.Node) -> None:
    x, graph = node.inputs[0], node.graph
    if x is None or graph is None or _dtype(x) != ir.DataType.FLOAT:
        return
    sizes, axes = _sizes(x), _axes(node)
    if sizes is None or len(long := [axis for axis in axes if sizes[axis] != 1]) != 1:
        return
    (axis,) = long
    behind, rows = sizes[axis + 1 :], sizes[axis]
    if not behind or (isinstance(rows, int) and rows < _FEW):
        return  # of a row, ONNX Runtime adds up several parts beside each other
    if isinstance(rows, int) and (count := _divisor(rows)) and sum(map(_is_named, behind)) < 2:
        known = [-1 if _is_named(size) else size for size in behind]
        shape = _constant([*[0] * axis, rows // count, count, *known])
        parts = ir.node("Reshape", [x, shape.outputs[0]], version=node.version)
        within = _constant([axis + 1])
        of_each = ir.node(
            node.op_type,
            [parts.outputs[0], within.outputs[0]],
            {"keepdims": 0},
            version=node.version,
        )
        made = [shape, parts, within, of_each]
    elif node.op_type == "ReduceSum" and len(behind) == 1:
        made = _by_product(x, axis, node.version)
    else:
        return
    made[-1].outputs[0].dtype = ir.DataType.FLOAT
    graph.insert_before(node, made)
    node.replace_input_with(0, made[-1].outputs[0])


def _by_product(x: ir.Value, axis: int, version: int | None) -> list[ir.Node]:
    """By a product with ones, which is in blocks, unless it is with a single row of these."""
    made: list[ir.Node] = []

    def call(name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        made.append(ir.node(name, inputs, attributes, version=version))
        return made[-1].outputs[0]

    def constant(value: ir.TensorProtocol) -> ir.Value:
        return call("Constant", value=value)

    none, two, first = (constant(ir.tensor([n], dtype=ir.DataType.INT64)) for n in (0, 2, 0))
    rows = call("Shape", x, start=axis, end=axis + 1)
    one, zero = (ir.tensor([value], dtype=ir.DataType.FLOAT) for value in (1.0, 0.0))
    ones = call("ConstantOfShape", call("Concat", two, rows, axis=0), value=one)
    total = call("Gather", call("MatMul", ones, x), first, axis=axis)
    # Of no rows, a product in ONNX Runtime, 1.31 at least, is whatever memory holds.
    call("Where", call("Equal", rows, none), constant(zero), total)
    return made


def _divisor(count: int) -> int | None:
    """The one next to the root, of those that make sums shorter by far."""
    near = sorted(range(8, count // 8 + 1), key=lambda each: abs(math.log(each * each / count)))
    return next((each for each in near if count % each == 0), None)


def _is_named(size: Any) -> bool:
    return not isinstance(size, int)


def _reduced(sizes: list[Any], axes: list[int], keepdims: int) -> list[Any]:
    """What is left of sizes."""
    if keepdims:
        return [1 if axis in axes else size for axis, size in enumerate(sizes)]
    return [size for axis, size in enumerate(sizes) if axis not in axes]


# torch.onnx notes types and sizes of what nodes of the program give, and of nothing in between.


def _dtype(x: ir.Value | None) -> ir.DataType | None:
    while x is not None and x.dtype is None:
        node = x.producer()
        x = node.inputs[0] if node is not None and node.op_type in _OF_ITS_DTYPE else None
    return None if x is None else x.dtype


def _sizes(x: ir.Value | None) -> list[Any] | None:
    if x is not None and x.shape is not None:
        return list(x.shape)
    node = None if x is None else x.producer()
    if node is None or node.op_type not in _OF_ITS_DTYPE:
        return None
    if node.op_type in _REDUCTIONS:
        whole, axes = _sizes(node.inputs[0]), _axes(node)
        if whole is None or not axes:
            return None
        return _reduced(whole, axes, node.attributes.get_int("keepdims", 1))
    # Where several broadcast: of their sizes the one that is not 1.
    known = []
    for value in node.inputs:
        if (sizes := _sizes(value)) is None:
            return None
        known.append(sizes)
    rank = max(map(len, known))
    columns = zip(*([1] * (rank - len(sizes)) + sizes for sizes in known), strict=True)
    return [next((size for size in column if size != 1), 1) for column in columns]


def _axes(node: ir.Node) -> list[int]:
    """In order, counted from the front; none where they are not known."""
    sizes = _sizes(node.inputs[0])
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        if sizes is None or node.attributes.get_int("noop_with_empty_axes", 0) != 0:
            return []
        return list(range(len(sizes)))
    maker = given.producer()
    if maker is not None and maker.op_type == "Reshape":  # as torch.onnx gives those of a mean
        given = maker.inputs[0]
    known = None if given is None else ir.convenience.get_const_tensor(given)
    axes = [] if known is None else [int(axis) for axis in known.numpy().reshape(-1)]
    if sizes is None:
        return sorted(axes) if all(axis >= 0 for axis in axes) else []
    return sorted(axis % len(sizes) for axis in axes)


def _constant(axes: list[int]) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(axes, dtype=ir.DataType.INT64)})


def of_volume(norm: fx.Node) -> Callable[..., Any] | None:
    """What computes a norm of volumes: its statistics are sums over hundreds of thousands.

    None for other nodes, and for norms of images and sequences: those ONNX has operators for, which
    runtimes compute in less time.
    """
    found = _NORMS.get(norm.target)
    return found if found and norm.args[0].meta["val"].dim() > 4 else None  # type: ignore[union-attr]


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    return _native_group_norm(x, weight, bias, 0, 0, 0, num_groups, eps)[0]


def _native_group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(1, (group, -1))
    dims = [*range(2, grouped.dim())]
    mean = grouped.mean(dims, keepdim=True)
    centred = grouped - mean
    rstd = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    shape = (-1, *(1 for _ in x.shape[2:]))
    y = (centred * rstd).flatten(1, 2)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return y, mean.flatten(1), rstd.flatten(1)


_NORMS: Table = {
    aten.instance_norm.default: aten.instance_norm.default.decompose,
    aten.group_norm.default: _group_norm,
    aten.native_group_norm.default: _native_group_norm,
}
