"""Regions of a model's code without gradients, in a capture: `with torch.no_grad():`."""

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuseport.exporter.program.regions import graphs

__all__ = ["detach_regions"]

aten = torch.ops.aten


def detach_regions(module: torch.fx.GraphModule) -> None:
    """Detach what regions without gradients return: decomposing keeps their operators only."""
    for part in graphs(module):
        for node in list(part.graph.nodes):
            if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
                continue
            for result in list(node.users):
                if not isinstance(result.meta["val"], Tensor):
                    continue
                value, written = result.meta["val"], _written(part, result)
                with part.graph.inserting_after(result):
                    detached = part.graph.call_function(aten.detach.default, (result,))
                    detached.meta["val"] = value
                own = {detached}
                if written is not None:
                    # The tensor has another value now, and the derivative that it had.
                    with part.graph.inserting_before(node):
                        before = part.graph.call_function(aten.clone.default, (written,))
                    before.meta["val"] = value
                    detached, own = _as_derivative_of(before, detached)
                result.replace_all_uses_with(detached, lambda user, own=own: user not in own)
        part.recompile()


def _written(part: torch.fx.GraphModule, result: torch.fx.Node) -> torch.fx.Node | None:
    """What a region writes into, if a result of it is that: `with torch.no_grad(): x.clamp_(0)`."""
    region = result.args[0]
    body = getattr(part, str(region.args[1].target))  # type: ignore[union-attr]
    (values,) = body.graph.output_node().args
    made = values[result.args[1]]
    before = made
    while isinstance(before.target, OpOverload) and _writes(before.target):
        before = before.args[0]
    if made is before or before.op != "placeholder":
        return None
    placeholders = body.graph.find_nodes(op="placeholder")
    given = region.args[2 + placeholders.index(before)]  # type: ignore[union-attr]
    real = given.op == "call_function" and given.meta["val"].is_floating_point()
    return given if real else None


def _writes(target: OpOverload) -> bool:
    """Whether it writes into its first argument, and returns it."""
    return any(argument.is_write for argument in target._schema.arguments[:1])


def _as_derivative_of(
    x: torch.fx.Node, value: torch.fx.Node
) -> tuple[torch.fx.Node, set[torch.fx.Node]]:
    """A node of this value with the derivative of another, and all that are made for it."""
    graph, made = x.graph, [value]

    def call(target: OpOverload, *arguments: torch.fx.Node) -> torch.fx.Node:
        with graph.inserting_after(made[-1]):
            made.append(graph.call_function(target, arguments))
        made[-1].meta["val"] = value.meta["val"]
        return made[-1]

    # Of what is not finite there is a number, too, which code may write there.
    nothing = call(aten.nan_to_num.default, call(aten.sub.Tensor, x, call(aten.detach.default, x)))
    return call(aten.add.Tensor, nothing, value), set(made)
