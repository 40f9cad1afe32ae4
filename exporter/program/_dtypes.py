"""Dtypes that a program does not leave to the process that it runs in."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import nodes
from fuseport.exporter.program.rewriting import is_composite

__all__ = ["named_dtypes"]

aten = torch.ops.aten


def named_dtypes(module: fx.GraphModule) -> None:
    """Have nodes name the dtype that was the default where they were captured.

    Model code may set another default (`torch.set_default_dtype(torch.float64)`), which is not that
    of who loads a program: of what is made without a dtype (`torch.ones(n)`), and of what is
    computed of integers alone (`counts / 2`).
    """
    for node in [*nodes(module)]:
        if not isinstance(node.target, OpOverload) or not _is_float(node):
            continue
        given = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if any(map(_is_float, given)):
            continue
        value = node.meta["val"]
        if node.target.overloadpacket is aten.where:
            _choose(node, value)
        elif given and _computes(node):
            for x in given:
                node.replace_input_with(x, _cast(node, x, value.dtype))
        elif not given and _names_dtype(node.target):
            node.update_kwarg("dtype", node.kwargs.get("dtype") or value.dtype)


def _names_dtype(operator: OpOverload) -> bool:
    return any(a.name == "dtype" and a.kwarg_only for a in operator._schema.arguments)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _computes(node: fx.Node) -> bool:
    """Whether an operator takes floats where it is given integers, and no dtype."""
    assert isinstance(node.target, OpOverload)
    if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
        return False
    return torch.Tag.pointwise in node.target.tags or is_composite(node.target)


def _cast(before: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    with before.graph.inserting_before(before):
        wide = before.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    wide.meta["val"] = x.meta["val"].to(dtype)
    within(wide, before)
    return wide


def _choose(node: fx.Node, value: Tensor) -> None:
    """Choose between two tensors of the dtype that is returned, not numbers or integers."""
    sides: list[Any] = list(node.args[1:])
    for i, side in enumerate(sides):
        if isinstance(side, fx.Node) and isinstance(side.meta["val"], Tensor):
            sides[i] = _cast(node, side, value.dtype)
            continue
        with node.graph.inserting_before(node):
            sides[i] = node.graph.call_function(
                aten.scalar_tensor.default, (side,), {"dtype": value.dtype}
            )
        sides[i].meta["val"] = value.new_empty(())
        within(sides[i], node)
    node.target, node.args = aten.where.self, (node.args[0], *sides)
