"""The gated norm as `RMSNormalization`, which ONNX has from opset 23 on, and a SiLU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.rms_norm.onnx_native import TYPES, normalised

__all__ = ["TYPES", "decompositions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"rms_norm_gated": _norm}


def _norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, Tensor] | None:
    wide = z.to(torch.float32)
    gate = wide / (1 + torch.exp(-wide))  # ONNX Runtime's Sigmoid is not accurate relatively
    inner = x.to(torch.float32)
    out = normalised(inner if norm_before_gate else inner * gate, weight, eps, group_size)
    if x.dtype == torch.float64 or out is None:
        return None
    out = out * gate if norm_before_gate else out
    return out.to(x.dtype), x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
