"""That sizes are not 1: what a capture takes for granted of it, and what hangs on that."""

import re
from collections.abc import Iterator, Sequence
from traceback import FrameSummary
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import SymInt, fx
from torch._guards import SLoc
from torch.export import ExportedProgram
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseport.exporter.program import shape_env
from fuseport.exporter.program.regions import nodes

__all__ = ["forget_ones"]

aten = torch.ops.aten

_GUARD = symbolic_shapes.ShapeGuard  # type: ignore[attr-defined]


def forget_ones(exported: ExportedProgram) -> None:
    """Drop the guards that say only that a size is not 1, and note where a result hangs on it.

    Torch asks that of sizes for the sake of strides and broadcasting. Without the option in
    `any_sizes` it assumes the same, and notes nothing. Size 1 is among those that are verified.

    Of `x.squeeze()` it takes for granted, without a guard, that dynamic dimensions stay. At size 1
    they go, and what was captured of the result may be something else then. So there is a guard,
    which is let go of where programs hold without.
    """
    guards = shape_env(exported).guards
    guards[:] = [g for g in guards if not (isinstance(g.expr, sympy.Ne) and g.expr.rhs == 1)]
    known = {guard.expr for guard in guards}
    for node in nodes(exported.graph_module):
        for size in _kept(node):
            asked = sympy.Ne(size.node.expr, 1)
            if isinstance(asked, sympy.Ne) and asked not in known:
                known.add(asked)
                guards.append(_GUARD(asked, SLoc(_place(node), None), False))


def _kept(node: fx.Node) -> Iterator[SymInt]:
    """The dynamic sizes of dimensions that were to be squeezed, and are still there."""
    if node.target not in _SQUEEZING:
        return
    x: Any = node.args[0]
    shape: Sequence[int | SymInt] = x.meta["val"].shape
    dims: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    for dim in [dims] if isinstance(dims, int) else dims:
        size = shape[dim] if shape else 1
        if isinstance(size, SymInt) and not free_unbacked_symbols(size):
            yield size


_SQUEEZING = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _place(node: fx.Node) -> FrameSummary | None:
    """Where model code calls a node."""
    found = re.findall(r'File "(.+)", line (\d+), in (.+)', node.meta.get("stack_trace") or "")
    return FrameSummary(found[-1][0], int(found[-1][1]), found[-1][2]) if found else None
