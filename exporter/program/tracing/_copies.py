"""What copies of views are, in a trace: torch has them in the place of views in regions.

It knows what a part by sizes that hang on values is (`x[:n]`), or one at such an index; of a copy
of it, it asks whether it is there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_impls

__all__ = ["copied_as_viewed"]

aten = torch.ops.aten

_COPIES = {aten.slice_copy.Tensor: aten.slice.Tensor, aten.select_copy.int: aten.select.int}


@contextmanager
def copied_as_viewed() -> Iterator[None]:
    """A copy is of the shape that the view has."""
    views = fake_impls.op_implementations_dict
    known = {copy: _copying(views[view], view) for copy, view in _COPIES.items() if view in views}
    with mock.patch.dict(views, known):
        yield


def _copying(view: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    def copied(mode: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        x = view(mode, operator, *args, **kwargs)
        if not isinstance(x, Tensor):  # NotImplemented
            return x
        with mode:
            return torch.clone(x, memory_format=torch.contiguous_format)

    return copied
