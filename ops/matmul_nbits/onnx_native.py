"""The layer as ONNX Runtime's `MatMulNBits`, whose weight stays in its bits in memory too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "decompositions"]

TYPES = {"MatMulNBits"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"matmul_nbits": _linear}


def _linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> Tensor | None:
    sizes = (16, 32, 64, 128, 256)  # of groups, that its kernels have
    if x.dtype == torch.float64 or group_size not in sizes or x.dim() < 2:
        return None
    if 0 in (in_features, *bias.shape):
        return None
    out = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulNBits",
        (x.float(), packed, scales, zero_points),
        {
            "K": in_features,
            "N": bias.shape[0],
            "bits": bits,
            "block_size": group_size,
            "accuracy_level": 1,
        },
        dtype=torch.float32,
        shape=(*x.shape[:-1], bias.shape[0]),
        version=1,
    )
    return (out + bias.float()).to(x.dtype)
