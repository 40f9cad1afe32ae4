"""What modules hold beside parameters, buffers and modules."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["attributes", "refill", "same_items", "tensors"]

# Attributes that every module has; and by which transformers knows that a module has hooks, which
# stay: without it a second call would add them again, and collect all states twice.
_TORCHS = frozenset((*vars(nn.Module()), "_output_capturing_hooks_installed"))


def tensors(value: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """It, or those that it holds, each with the keys that lead to it; None leads into a set."""
    if isinstance(value, Tensor):
        yield (), value
    elif isinstance(value, dict | list | set | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            for keys, tensor in tensors(each):
                yield (None if isinstance(value, set) else key, *keys), tensor


def attributes(part: nn.Module) -> dict[str, Any]:
    """A module's own attributes, but parameters, buffers and modules."""
    return {name: value for name, value in vars(part).items() if name not in _TORCHS}


def same_items(items: Any, others: Any) -> bool:
    """Whether two containers hold the very same things."""
    if isinstance(items, dict):
        return items.keys() == others.keys() and all(others[k] is v for k, v in items.items())
    return len(items) == len(others) and all(a is b for a, b in zip(items, others, strict=True))


def refill(container: Any, items: Any) -> None:
    """Have a container hold these again, and nothing else."""
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.update(items)
