"""A program held against its model, at other sizes than those that it was captured at."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx, nn

from fuseport.exporter.capture.counts import Call
from fuseport.exporter.program import Program
from fuseport.exporter.program.conditions import admits, sizes_at
from fuseport.exporter.program.loops.rolled import Unrolled
from fuseport.exporter.program.matching import marked, unmark
from fuseport.exporter.program.rounding import same

__all__ = ["going_its_way", "hold", "is_same"]


def hold(program: Program, calls: Iterable[Call]) -> None:
    """Hold a program with loops against its model.

    Args:
        program: of a forward.
        calls: at inputs of several sizes.

    Raises:
        Unrolled: it gives something else than the model does, or there are no two sizes at which
            both can be asked.
    """
    compared = set()
    module = going_its_way(program)
    for call in calls:
        try:
            inputs, expected = call()
        except Exception:  # the model's own, which may take no such sizes
            continue
        sizes = sizes_at(program, inputs)
        if not admits(program, sizes):
            continue
        if not is_same(module, inputs, expected):
            at = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
            raise Unrolled(
                f"a loop over a dynamic size does otherwise in some of its turns: at {at} its "
                "program gives something else than the model"
            )
        compared.add(tuple(sizes.items()))
    if len(compared) < 2:
        raise Unrolled(
            "a loop over a dynamic size is not known to do the same in all of its turns: there are "
            "no two sizes at which the model runs"
        )


def going_its_way(program: Program) -> nn.Module:
    """A program to be called where the model is made to decide as it does, whatever the values."""
    module = program.exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    unmark(module.graph, marked(module.graph))
    module.recompile()
    return module


def is_same(module: nn.Module, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether a program gives what its model does."""
    try:
        with torch.no_grad():
            result = module(*inputs)
    except Exception:  # of an operator, as of places that there are not
        return False
    return same(result, expected)
