"""The rotation as `RotaryEmbedding`, which ONNX has from opset 23 on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "decompositions"]

TYPES = {"RotaryEmbedding"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"rotary_embedding": _rotary}


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
    if x.dtype == torch.float64 or cos.shape[-1] == 0:
        return None
    angles = [t.float().expand(x.shape[0], *t.shape[-2:]) for t in (cos, sin)]
    out = torch.onnx.ops.symbolic(
        "RotaryEmbedding",
        (x.float(), *angles),
        {"interleaved": int(interleaved), "rotary_embedding_dim": 2 * cos.shape[-1]},
        dtype=torch.float32,
        shape=x.shape,
        version=23,
    )
    return out.to(x.dtype)
