"""Functions of sizes, `math.floor(length * 0.7)`, in terms of others where a format has no form.

Torch's files have one of the whole part alone, of comparisons, and of a choice between two numbers;
torch.onnx has none of `round`.
"""

import copy
import functools
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.regions import graphs
from fuseport.exporter.program.sizes.of_graph import Sizes

__all__ = ["FORMS", "written_out"]

_Call = Callable[..., Any]


def _count(call: _Call, compared: Any, x: Any, y: Any) -> Any:
    return call(torch.sym_ite, call(compared, x, y), 1, 0)


def _floor(call: _Call, x: Any) -> Any:
    whole = call(math.trunc, x)
    over = _count(call, operator.gt, call(torch.sym_float, whole), x)
    return call(operator.sub, whole, over)


def _ceil(call: _Call, x: Any) -> Any:
    whole = call(math.trunc, x)
    short = _count(call, operator.lt, call(torch.sym_float, whole), x)
    return call(operator.add, whole, short)


def _round(call: _Call, x: Any) -> Any:
    # Of two that are as near, the even one, as Python has it.
    below = _floor(call, x)
    over = call(operator.sub, x, call(torch.sym_float, below))
    more, between = (_count(call, compared, over, 0.5) for compared in (operator.gt, operator.eq))
    odd = call(operator.mul, between, call(operator.mod, below, 2))
    return call(operator.add, call(operator.add, below, more), odd)


def _abs(call: _Call, x: Any) -> Any:
    return call(torch.sym_max, x, call(operator.neg, x))


FORMS: dict[Any, Callable[[_Call, Any], Any]] = {
    math.floor: _floor,
    math.ceil: _ceil,
    round: _round,
    operator.abs: _abs,
}

"""What each is in terms of others, made by a function that calls one."""


def written_out(exported: ExportedProgram, functions: Collection[Any]) -> ExportedProgram:
    """A program that calls none of these functions: the one given, if so."""

    def rounding(part: fx.GraphModule) -> list[fx.Node]:
        nodes = [node for node in part.graph.nodes if node.target in functions]
        return [node for node in nodes if node.args[1:] in ((), (None,))]  # to whole numbers

    if not any(map(rounding, graphs(exported.graph_module))):
        return exported
    module = copy.deepcopy(exported.graph_module)
    for part in graphs(module):
        sizes = Sizes(part.graph, mode_of(module.graph))
        for node in rounding(part):
            made = FORMS[node.target](functools.partial(sizes.call, node), node.args[0])
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
            part.graph.erase_node(node)
        part.graph.lint()
        part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)
