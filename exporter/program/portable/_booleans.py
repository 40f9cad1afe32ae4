"""Choices between booleans, by logic.

ONNX Runtime has no Where of booleans, and TorchScript takes `True` beside a tensor for the integer
1, of which `torch.where` makes integers.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["chosen", "filled"]


def chosen(condition: Tensor, input: Any, other: Any) -> Any:
    """`torch.where` of booleans: tensors, which broadcast, or numbers."""
    if not _is_boolean(input) or not _is_boolean(other):
        return NotImplemented
    there, elsewhere = _both(condition, input), _both(~condition, other)
    if there is None or elsewhere is None:
        found = elsewhere if there is None else there
        return torch.zeros_like(condition) if found is None else found.clone()
    return there | elsewhere


def filled(x: Tensor, mask: Tensor, value: Any) -> Any:
    """`torch.masked_fill` of booleans."""
    if x.dtype != torch.bool:
        return NotImplemented
    return chosen(mask, value.bool() if isinstance(value, Tensor) else bool(value), x)


def _is_boolean(value: Any) -> bool:
    return value.dtype == torch.bool if isinstance(value, Tensor) else isinstance(value, bool)


def _both(condition: Tensor, value: Tensor | bool) -> Tensor | None:
    """Where both are true; None where the value never is."""
    if isinstance(value, Tensor):
        return condition & value
    return condition if value else None
