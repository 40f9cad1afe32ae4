"""What is written to a part of a tensor that the value of another, or a size, says: `x[i] = y`."""

from typing import Any

import torch
from torch import SymInt, Tensor

__all__ = ["written"]


def written(x: Tensor, index: Any, value: Any) -> Any:
    """Write it by index, of which torch would make a number that a capture has none of.

    Of several, `x[n - 1, :]`, torch makes numbers of sizes, too.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    said = any(_is_number(item) or isinstance(item, SymInt) for item in items)
    if not said or not all(map(_is_single, items)):
        return NotImplemented
    taken = sum(item is not None and item is not Ellipsis for item in items)
    places: list[Tensor | None] = []
    sizes: list[tuple[int, SymInt]] = []  # last: of a view of theirs torch asks for bounds again
    for item in items:
        dim = len(places) + len(sizes)
        if isinstance(item, Tensor):
            places.append(item)
        elif item is Ellipsis:
            places += [None] * (x.dim() - dim - taken)
        elif isinstance(item, slice) or item is None:
            x = x.unsqueeze(dim) if item is None else x[(*[slice(None)] * dim, item)]
            places.append(None)
        elif isinstance(item, SymInt):
            sizes.append((dim, item))
        else:
            x = x.select(dim, item)
        taken -= item is not None and item is not Ellipsis
    for dim, item in reversed(sizes):
        x = x.select(dim, item)
    if isinstance(value, Tensor):
        value = value.to(x.device, x.dtype)
        for _ in range(value.dim() - x.dim() + sum(place is not None for place in places)):
            value = value.squeeze(0)
    else:
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    if all(place is None for place in places):
        x.copy_(value)
    else:
        torch.ops.aten.index_put_.default(x, places, value)
    return None


def _is_number(item: Any) -> bool:
    if not isinstance(item, Tensor) or item.dim() or item.dtype == torch.bool:
        return False
    return not item.is_floating_point() and not item.is_complex()


def _is_single(item: Any) -> bool:
    if isinstance(item, slice):
        return all(_is_bound(each) for each in (item.start, item.stop, item.step))
    is_size = isinstance(item, int | SymInt) and not isinstance(item, bool)
    return item is None or item is Ellipsis or is_size or _is_number(item)


def _is_bound(value: Any) -> bool:
    return value is None or isinstance(value, int | SymInt)
