"""The layer as ONNX Runtime's `MatMulBnb4`, whose weight stays in four bits in memory too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "decompositions"]

TYPES = {"MatMulBnb4"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"nf4_linear": _linear}


def _linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> Tensor | None:
    sizes = (16, 32, 64, 128, 256)  # of blocks, that its kernel has
    if x.dtype == torch.float64 or block_size not in sizes or x.dim() < 2:
        return None
    if 0 in (in_features, *bias.shape):
        return None
    out = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulBnb4",
        (x.float(), packed, absmax),
        {
            "K": in_features,
            "N": bias.shape[0],
            "block_size": block_size,
            "quant_type": quant_type,
        },
        dtype=torch.float32,
        shape=(*x.shape[:-1], bias.shape[0]),
        version=1,
    )
    return (out + bias.float()).to(x.dtype)
