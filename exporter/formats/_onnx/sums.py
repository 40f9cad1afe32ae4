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
    made = _Made(node.version)
    for group in groups[:-1]:
        x = made.call(node.op_type, x, made.numbers(*group), keepdims=keepdims)
        x.dtype = ir.DataType.FLOAT
    last = made.numbers(*groups[-1])
    graph.insert_before(node, made.nodes)
    node.resize_inputs(2)
    for index, value in enumerate((x, last)):
        node.replace_input_with(index, value)


def in_blocks(model: ir.Model) -> None:
    """Add up many rows of float32, over all axes but the last, in blocks, which are added up then.

    Over fewer axes, ONNX Runtime has no product of none of a batch.
    """
    for node in tuple(model.graph.all_nodes()):
        if node.op_type in _REDUCTIONS and not node.domain:
            _block(node)


_FEW = 512  # rows, whose sum is off by no more than those of a block


def _block(node: ir.Node) -> None:
    x, graph = node.inputs[0], node.graph
    if x is None or graph is None or _dtype(x) != ir.DataType.FLOAT:
        return
    sizes, axes = _sizes(x), _axes(node)
    if not sizes or len(sizes) < 2 or len(sizes) - 1 in axes or not isinstance(sizes[-1], int):
        return
    if not sizes[-1] or any(size != 1 and axis not in axes for axis, size in enumerate(sizes[:-1])):
        return
    named = not all(isinstance(size, int) for size in sizes)
    rows = 0 if named else math.prod(sizes[:-1])
    if not named and rows < _FEW:
        return
    made = _Made(node.version)
    if count := _divisor(rows):
        parts = made.reshaped(x, rows // count, count, sizes[-1])
        each = made.call(node.op_type, parts, made.numbers(1), keepdims=0)
        total = made.call(node.op_type, each, made.numbers(0), keepdims=1)
    elif node.op_type == "ReduceSum":
        total = _by_product(made, made.reshaped(x, -1, sizes[-1]) if len(sizes) > 2 else x)
    else:
        return
    total = made.reshaped(total, *[1] * (len(sizes) - 1), sizes[-1])
    total.dtype, total.shape = ir.DataType.FLOAT, ir.Shape([*[1] * (len(sizes) - 1), sizes[-1]])
    graph.insert_before(node, made.nodes)
    node.replace_input_with(0, total)


class _Made:
    """Nodes, one after another.

    Attributes:
        nodes: of which each takes what those before give.
    """

    def __init__(self, version: int | None) -> None:
        self.nodes: list[ir.Node] = []
        self._version = version

    def call(self, name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """What another node gives."""
        self.nodes.append(ir.node(name, inputs, attributes, version=self._version))
        return self.nodes[-1].outputs[0]

    def numbers(self, *numbers: int) -> ir.Value:
        """A vector of these."""
        return self.call("Constant", value=ir.tensor(numbers, dtype=ir.DataType.INT64))

    def reshaped(self, x: ir.Value, *sizes: int) -> ir.Value:
        """The same numbers in another shape."""
        return self.call("Reshape", x, self.numbers(*sizes))


def _by_product(made: _Made, x: ir.Value) -> ir.Value:
    """By a product with ones, which is in blocks, unless it is with a single row of these."""
    one, zero = (ir.tensor([value], dtype=ir.DataType.FLOAT) for value in (1.0, 0.0))
    rows = made.call("Shape", x, start=0, end=1)
    shape = made.call("Concat", made.numbers(2), rows, axis=0)
    twice = made.call("MatMul", made.call("ConstantOfShape", shape, value=one), x)
    total = made.call("Gather", twice, made.numbers(0), axis=0)
    # Of no rows, a product in ONNX Runtime, 1.31 at least, is whatever memory holds.
    none = made.call("Equal", rows, made.numbers(0))
    return made.call("Where", none, made.call("Constant", value=zero), total)


def _divisor(count: int) -> int | None:
    """The one next below the root, of those that make sums shorter by far."""
    return next((each for each in range(math.isqrt(count), 15, -1) if count % each == 0), None)


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
        if whole is None or not axes or not node.attributes.get_int("keepdims", 1):
            return None
        return [1 if axis in axes else size for axis, size in enumerate(whole)]
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
