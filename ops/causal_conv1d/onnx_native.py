"""The convolution as ONNX Runtime's `CausalConvWithState`, which opset 27 has too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "convolved", "decompositions"]

TYPES = {"CausalConvWithState"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"causal_conv1d": convolved}


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor, states: Tensor, silu: bool
) -> tuple[Tensor, ...] | None:
    """out and the last inputs, in x's dtype; None for what the operator has not."""
    if x.dtype == torch.float64 or weight.shape[1] < 2:
        return None
    wide = [t.to(torch.float32) for t in (x, weight.unsqueeze(1), bias, states)]
    out, last = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::CausalConvWithState",
        wide,
        {"activation": "silu" if silu else "none"},
        dtypes=(torch.float32, torch.float32),
        shapes=(x.shape, states.shape),
        version=1,
    )
    return out.to(x.dtype), last.to(x.dtype)
