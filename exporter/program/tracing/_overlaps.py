"""Whether a tensor that is written to overlaps itself, without questions about its sizes.

torch asks of every size, at a write in place, whether it is greater than one, and only then whether
the stride is zero: a program with `x[:, 1:] += y[:, :-1]` held for a length of three and more, and
for no batch of one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["asked_by_strides"]

_TOO_HARD = 2  # of c10::MemOverlap: neither seen nor excluded, which torch lets pass


@contextmanager
def asked_by_strides() -> Iterator[None]:
    """Sizes are asked of only where a stride is zero."""
    copy = torch.ops.aten.copy.default
    plain, copied = torch._debug_has_internal_overlap, fake_impls.op_implementations_dict.get(copy)

    def has_internal_overlap(tensor: Tensor) -> int:
        return _TOO_HARD if _is_apart(tensor) else plain(tensor)

    def copy_of(mode: FakeTensorMode, func: Any, x: Tensor, source: Tensor, *more: Any) -> Tensor:
        # C++ clones `x` with its strides, unless it overlaps itself.
        if copied and not _is_apart(x):
            made: Tensor = copied(mode, func, x, source, *more)
            return made
        with mode:
            torch._refs.expand(source, x.shape)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    with (
        mock.patch.object(torch, "_debug_has_internal_overlap", has_internal_overlap),
        mock.patch.dict(fake_impls.op_implementations_dict, {copy: copy_of} if copied else {}),
    ):
        yield


def _is_apart(x: Tensor) -> bool:
    """Whether some size is a symbol, and no stride is zero."""
    numbers = all(isinstance(n, int) for n in (*x.shape, *x.stride()))
    return not numbers and not any(isinstance(n, int) and n == 0 for n in x.stride())
