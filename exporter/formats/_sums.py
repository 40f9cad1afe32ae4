"""Sums in ONNX that keep what float32 holds: over one axis at a time.

A runtime adds up in the order that it finds numbers. ONNX Runtime takes those of several axes one
after another: of a volume of 65 × 65 × 65 its mean is off by a hundred roundings, and the gradient
of a bias by more. Over one axis after another the sums are short, take the same time, and are off
by a few.
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

__all__ = ["NORMS_OF_VOLUMES", "one_axis_at_a_time"]

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
    axes = _axes(node)
    if x is None or graph is None or _dtype(x) != ir.DataType.FLOAT or len(axes) < 2:
        return
    keepdims = node.attributes.get_int("keepdims", 1)
    # From the last axis on, so that those before keep their numbers; what has one element only
    # goes with it.
    ones = [axis for axis in axes if x.shape is not None and x.shape[axis] == 1]
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
        graph.insert_before(node, (constant, part))
    constant = _constant(groups[-1])
    graph.insert_before(node, constant)
    output = node.outputs[0]
    last = ir.node(
        node.op_type,
        [x, constant.outputs[0]],
        {"keepdims": keepdims},
        version=node.version,
        metadata_props=node.metadata_props,
    )
    ir.convenience.replace_nodes_and_values(graph, node, [node], [last], [output], last.outputs)


def _dtype(x: ir.Value | None) -> ir.DataType | None:
    # torch.onnx notes it of its nodes' results, and of nothing in between.
    while x is not None and x.dtype is None:
        node = x.producer()
        x = node.inputs[0] if node is not None and node.op_type in _OF_ITS_DTYPE else None
    return None if x is None else x.dtype


def _axes(node: ir.Node) -> list[int]:
    """In order, counted from the front; none where they are not known."""
    x = node.inputs[0]
    rank = None if x is None or x.shape is None else len(x.shape)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        every = not node.attributes.get_int("noop_with_empty_axes", 0)
        return list(range(rank)) if rank is not None and every else []
    maker = given.producer()
    if maker is not None and maker.op_type == "Reshape":  # as torch.onnx gives those of a mean
        given = maker.inputs[0]
    known = None if given is None else ir.convenience.get_const_tensor(given)
    axes = [] if known is None else [int(axis) for axis in known.numpy().reshape(-1)]
    if rank is None:
        return sorted(axes) if all(axis >= 0 for axis in axes) else []
    return sorted(axis % rank for axis in axes)


def _constant(axes: list[int]) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(axes, dtype=ir.DataType.INT64)})


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not use_input_stats:
        return NotImplemented
    return _scaled(_normalized(x, eps)[0], weight, bias)


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
    grouped, *statistics = _normalized(x.unflatten(1, (group, -1)), eps)
    mean, rstd = (statistic.flatten(1) for statistic in statistics)
    return _scaled(grouped.flatten(1, 2), weight, bias), mean, rstd


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(b, c, …), its mean over all that follows c, and what it was divided by, inverted."""
    dims = [*range(2, x.dim())]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    return centred * rstd, mean, rstd


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *(1 for _ in y.shape[2:]))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


NORMS_OF_VOLUMES: dict[Any, Callable[..., Any]] = {
    aten.instance_norm.default: _instance_norm,
    aten.group_norm.default: _group_norm,
    aten.native_group_norm.default: _native_group_norm,
}
"""Of volumes: their statistics are means over hundreds of thousands of numbers, which ONNX's
InstanceNormalization leaves to the runtime. It takes the same time."""
