"""What ops say of inputs that do not fit: one line, the same in eager, under a fake, and in C++.

`native/checks.hpp` has the same checks with the same messages, for hosts that have no Python.
"""

import torch
from torch import Tensor

__all__ = ["dtype_name", "require", "require_like", "require_shape"]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def require(holds: bool, op: str, name: str, expected: str, got: object) -> None:
    """Raises ValueError, naming the op and its argument, unless `holds`."""
    if not holds:
        raise ValueError(f"fuseport::{op}: {name} must be {expected}; got {got}")


def require_shape(op: str, name: str, t: Tensor, meaning: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `t` has that shape, which `meaning` says in letters."""
    same = t.dim() == len(shape) and all(
        got == want for got, want in zip(t.shape, shape, strict=True)
    )
    if not same:
        require(False, op, name, f"{meaning} = {tuple(shape)}", tuple(t.shape))


def require_like(
    op: str, name: str, t: Tensor, dtype: torch.dtype, first: Tensor, first_name: str
) -> None:
    """Raises ValueError unless `t` has that dtype, and is where the op's first input is."""
    require(t.dtype == dtype, op, name, dtype_name(dtype), dtype_name(t.dtype))
    where = f"on {first.device}, like {first_name}"
    require(t.device == first.device, op, name, where, t.device)
