"""The norm as `RMSNormalization`, which ONNX has from opset 23 on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "decompositions", "normalised"]

TYPES = {"RMSNormalization"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"rms_norm": _norm}


def normalised(x: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor | None:
    """x·weight / √(mean(x²) + eps) over all of a row; None for what it cannot say."""
    if group_size != x.shape[-1] or x.dtype == torch.float64:
        return None  # eps is a float32 there
    out = torch.onnx.ops.symbolic(
        "RMSNormalization",
        (x.to(torch.float32), weight.to(torch.float32)),
        {"axis": -1, "epsilon": eps, "stash_type": 1},
        dtype=torch.float32,
        shape=x.shape,
        version=23,
    )
    return out


def _norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> tuple[Tensor, Tensor] | None:
    out = normalised(x, weight, eps, group_size)
    if out is None:
        return None
    # Only the backward of torch reads rstd.
    return out.to(x.dtype), x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
