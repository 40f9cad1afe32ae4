"""Programs of float64 in ONNX: torch.onnx has numbers in float32, and ONNX has attributes in it."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fuseport.exporter.formats._onnx.functions.special import log1p
from fuseport.exporter.program.regions import WHILE
from fuseport.exporter.program.rewriting import Table

__all__ = ["IN_FLOAT32", "factors_apart", "in_full", "of_float64"]

aten = torch.ops.aten

_BODIES = ("then_branch", "else_branch", "body")
"""The graphs of an If, in the order of torch's `cond`, and of a Scan or a Loop."""

_FX_NODE = "pkg.torch.onnx.fx_node"  # where torch.onnx notes what a node is of


def in_full(model: ir.Model, translated: ExportedProgram) -> None:
    """Make numbers among float64 what they are, and those of sizes: torch.onnx makes them float32.

    `int(length * 0.29)` is 28 of a length of 100, as Python has it, and would be 29.
    """
    calls = dict(_calls(model.graph, translated.graph_module))

    @functools.cache
    def in_float64(call: fx.Node) -> bool:
        values = [call.meta.get("val"), *(n.meta.get("val") for n in call.all_input_nodes)]
        dtypes = {x.dtype for x in pytree.tree_leaves(values) if isinstance(x, Tensor)}
        if dtypes:
            return {dtype for dtype in dtypes if dtype.is_floating_point} == {torch.float64}
        return any(isinstance(value, torch.SymFloat) for value in values)  # of sizes

    for node, call in calls.items():
        if not in_float64(call):
            continue
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.DOUBLE)
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                output.dtype = ir.DataType.DOUBLE
        for index, value in enumerate(node.inputs):
            rounded = None if value is None else ir.convenience.get_const_tensor(value)
            if rounded is not None and rounded.dtype == ir.DataType.FLOAT and rounded.size == 1:
                number = ir.tensor(_unrounded(rounded.numpy(), call))
                constant = ir.node("Constant", [], {"value": number})
                assert isinstance(node.graph, ir.Graph)
                node.graph.insert_before(node, constant)
                node.replace_input_with(index, constant.outputs[0])
    for node, call in calls.items():
        if isinstance(call.meta.get("val"), torch.SymFloat):
            for output in node.outputs:
                if output.dtype == ir.DataType.DOUBLE:
                    beside = [
                        (user, index)
                        for user, index in output.uses()
                        if (of := calls.get(user)) is None or not in_float64(of)
                    ]
                    _in_float32(output, beside)


def factors_apart(model: ir.Model) -> None:
    """Have something stand between products of matrices of float64 and a number that they are
    multiplied by: ONNX Runtime takes that into the product, and as one of float32."""
    products = [node for node in model.graph.all_nodes() if _is_product(node)]
    before = (_turned(value) for node in products for value in node.inputs)
    behind = (user for node in products for user, _ in node.outputs[0].uses())
    for node in dict.fromkeys(each for each in (*before, *behind) if each is not None):
        _part(node)


def _is_product(node: ir.Node | None) -> bool:
    """Whether it is one of matrices of float64."""
    if node is None or node.op_type != "MatMul":
        return False
    return any(value is not None and value.dtype == ir.DataType.DOUBLE for value in node.outputs)


def _turned(value: ir.Value | None) -> ir.Node | None:
    """What makes a value, but for transposes, which go into a product, too."""
    node = None if value is None else value.producer()
    return _turned(node.inputs[0]) if node is not None and node.op_type == "Transpose" else node


def _is_taken(value: ir.Value) -> bool:
    """Whether a product takes it, be it transposed."""
    users = [user for user, _ in value.uses()]
    turned = (user.outputs[0] for user in users if user.op_type == "Transpose")
    return any(map(_is_product, users)) or any(map(_is_taken, turned))


def _part(node: ir.Node) -> None:
    """Have a product by a number be one by its negative, of which the negative is taken."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return
    at = 1 if _number(node.inputs[1]) is not None else 0
    number = _number(node.inputs[at])
    if number is None or (node.op_type == "Div" and at == 0):
        return
    x, product, graph = node.inputs[1 - at], node.outputs[0], node.graph
    assert x is not None
    assert graph is not None
    if _is_product(x.producer()):
        other = ir.node("Neg", [x])
        graph.insert_before(node, other)
        other.outputs[0].type, other.outputs[0].shape = x.type, x.shape
        node.replace_input_with(1 - at, other.outputs[0])
        number = -number
    if _is_taken(product):
        other = ir.node("Neg", [product])
        graph.insert_after(node, other)
        whole = other.outputs[0]
        whole.name, product.name = product.name, f"{product.name}_negative"
        whole.type, whole.shape = product.type, product.shape
        product.replace_all_uses_with(whole, replace_graph_outputs=True)
        other.replace_input_with(0, product)
        number = -number
    constant = ir.node("Constant", [], {"value": ir.tensor(np.float64(number))})
    graph.insert_before(node, constant)
    node.replace_input_with(at, constant.outputs[0])


def _number(value: ir.Value | None) -> float | None:
    """The constant that a value is; None if it is none, or not one of float64."""
    while value is not None and (made := value.producer()) is not None and made.op_type == "Cast":
        if made.attributes["to"].as_int() != ir.DataType.DOUBLE:
            return None
        value = made.inputs[0]
    known = None if value is None else ir.convenience.get_const_tensor(value)
    return float(known.numpy().item()) if known is not None and known.size == 1 else None


def _calls(graph: ir.Graph, made_of: fx.GraphModule) -> Iterator[tuple[ir.Node, fx.Node]]:
    """The nodes of a graph, and of those inside of them, each with the call that it was made of."""
    named = {f"%{call.name}": call for call in made_of.graph.nodes}
    for node in graph:
        call = named.get(node.metadata_props.get(_FX_NODE, "").partition(" ")[0])
        if call is None:
            continue
        yield node, call
        inside = [node.attributes[name].as_graph() for name in _BODIES if name in node.attributes]
        bodies = [each for each in pytree.tree_leaves(call.args) if _is_body(made_of, each)]
        if call.target is WHILE:  # of which nothing is computed to tell whether it goes on
            bodies = bodies[1:]
        if len(bodies) == len(inside):  # else torch.onnx has them for an operator of its own
            for part, body in zip(inside, bodies, strict=True):
                yield from _calls(part, getattr(made_of, body.target))


def _is_body(module: fx.GraphModule, value: Any) -> bool:
    """Whether it is the node of a graph that another node calls."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    return isinstance(getattr(module, str(value.target), None), fx.GraphModule)


def _in_float32(number: ir.Value, uses: Sequence[tuple[ir.Node, int]]) -> None:
    """Have these take a number of float64 rounded, as their tensors are."""
    node = number.producer()
    if not uses or node is None or not isinstance(node.graph, ir.Graph):
        return
    rounded = ir.node("Cast", [number], {"to": ir.DataType.FLOAT})
    rounded.outputs[0].dtype = ir.DataType.FLOAT
    node.graph.insert_after(node, rounded)
    for user, index in uses:
        user.replace_input_with(index, rounded.outputs[0])


def _unrounded(rounded: np.ndarray, call: fx.Node) -> np.ndarray:
    """The number among a call's arguments that was rounded to this one; if none was, the same."""
    given = pytree.tree_leaves((call.args, call.kwargs))
    whole = {x for x in given if isinstance(x, float) and np.float32(x) == rounded}
    return np.full(rounded.shape, whole.pop() if len(whole) == 1 else rounded, np.float64)


def of_float64(node: fx.Node) -> bool:
    """Whether it is of float64."""
    values = [n.meta["val"] for n in node.all_input_nodes]
    return any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in values)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x * beta
    log = log1p(torch.exp(-scaled.abs()))
    return torch.where(scaled > threshold, x, (scaled.clamp(min=0) + log) / beta)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # By the running statistics, of which nothing is saved.
    shape = (-1, *(1 for _ in x.shape[2:]))
    y = (x - mean.reshape(shape)) * torch.rsqrt(var + eps).reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return y, x.new_zeros(0), x.new_zeros(0)


# What ONNX, or torch.onnx, computes with numbers of float32 though the tensors be of float64:
# epsilons, slopes, logarithms of bases. ONNX Runtime has few of these in float64 at all.
IN_FLOAT32: Table = {
    **{
        composite: composite.decompose
        for composite in (
            aten.layer_norm.default,
            aten.group_norm.default,
            aten.instance_norm.default,
            aten.selu.default,
        )
    },
    **{
        target: decomposition_table[target]
        for target in (
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten._native_batch_norm_legit.no_stats,
            aten.gelu.default,
            aten.elu.default,
            aten.celu.default,
            aten.leaky_relu.default,
            aten._prelu_kernel.default,
            aten.hardswish.default,
            aten.hardsigmoid.default,
            aten.addmm.default,
            aten.addmv.default,
            aten.baddbmm.default,
            aten.sinc.default,
        )
    },
    aten.prelu.default: aten.prelu.default.decompose,
    aten.softplus.default: _softplus,
    aten.mish.default: lambda x: x * torch.tanh(_softplus(x)),
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.log2.default: lambda x: torch.log(x) / math.log(2),
    aten.log10.default: lambda x: torch.log(x) / math.log(10),
}
