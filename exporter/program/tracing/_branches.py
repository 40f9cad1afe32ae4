"""What both ways of a branch give, of the same sizes and strides, as one tensor of these.

torch works out its strides anew, as products of sizes. Where a size may be none, as half of a
length, strides have `Max(1, length//2)` in the place of it, or those of one have: it refuses them.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Max

__all__ = ["alike_merged"]


@contextmanager
def alike_merged() -> Iterator[None]:
    """Where torch traces branches, what both give alike is that."""
    cond = importlib.import_module("torch._higher_order_ops.cond")  # a function has its name, too
    merge = getattr(cond, "_merge_output", None)  # private: another torch may lack it
    if merge is None:
        yield
        return

    def merged(a: Any, b: Any, mode: Any) -> Any:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or _layout(a) != _layout(b):
            return merge(a, b, mode)
        if any(free_unbacked_symbols(size) for size in (*a.shape, *b.shape)):
            return merge(a, b, mode)
        with mode:
            return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device)

    with mock.patch.object(cond, "_merge_output", merged):
        yield


def _layout(x: Tensor) -> tuple[Any, ...]:
    strides = tuple(_at_least_one(stride) for stride in x.stride())
    return str(tuple(x.shape)), strides, x.dtype, x.device, x.storage_offset() == 0


def _at_least_one(stride: int | torch.SymInt) -> sympy.Basic:
    """A stride as it is where nothing that it is a product of is none.

    Torch has `Max(1, n)` for a number of values there, and `Max(0, n)` in a shape.
    """
    if isinstance(stride, int):
        return sympy.Integer(stride)
    factors = sympy.Mul.make_args(stride.node.expr)
    return sympy.Mul(
        *(
            Max(*(each for each in factor.args if each not in (0, 1)))
            if isinstance(factor, Max)
            else factor
            for factor in factors
        )
    )
