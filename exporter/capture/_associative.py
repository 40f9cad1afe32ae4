"""Torch's `associative_scan`, which halves what it goes over until one is left: of any size.

How often that is hangs on the size, which a capture takes from its example. One step after another
gives the same, and is a loop over the size.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuseport.exporter.capture._gone_over import is_dynamic
from fuseport.exporter.capture.blockers import users_frame

__all__ = ["noting", "one_by_one"]

# A function has the module's name, too.
_defining = importlib.import_module("torch._higher_order_ops.associative_scan")
_NAME = "generic_associative_scan"  # private: another torch may lack it

Patch = AbstractContextManager[Any]


def noting(note: Callable[[FrameType], None]) -> Patch:
    """Within, the code that scans a dynamic dimension is noted."""

    def noted(own: Any, operator: Any, leaves: Sequence[Tensor], dim: int, others: Any) -> Any:
        note(users_frame(sys._getframe(1)))
        return own(operator, leaves, dim, others)

    return _instead(noted)


def one_by_one(numbers: Callable[[int, Any], Any]) -> Patch:
    """Within, a dynamic dimension is scanned by a loop over `numbers`, which is `range`."""

    def scanned(own: Any, operator: Any, leaves: Sequence[Tensor], dim: int, others: Any) -> Any:
        at = [leaf.narrow(dim, 0, 1) for leaf in leaves]
        steps = [at]
        for t in numbers(1, leaves[0].shape[dim]):
            next_ones = [leaf.narrow(dim, t, 1) for leaf in leaves]
            at = pytree.tree_leaves(operator(*at, *next_ones, *others))
            steps.append(at)
        return [torch.cat(each, dim) for each in zip(*steps, strict=True)]

    return _instead(scanned)


def _instead(function: Any) -> Patch:
    own = getattr(_defining, _NAME, None)
    if own is None:
        return nullcontext()

    def scan(operator: Any, leaves: Any, dim: int = 0, additional_inputs: Any = ()) -> Any:
        if not is_dynamic(leaves[0].shape[dim]):
            return own(operator, leaves, dim, additional_inputs)
        return function(own, operator, leaves, dim, additional_inputs)

    return mock.patch.object(_defining, _NAME, scan)
