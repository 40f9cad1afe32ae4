"""A decoding step as ONNX Runtime's `CausalConvWithState`, which opset 27 has too."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fuseport.ops.causal_conv1d.onnx_native import TYPES, convolved

__all__ = ["TYPES", "decompositions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"causal_conv1d_update": _update}


def _update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor, silu: bool
) -> tuple[Tensor, ...] | None:
    if conv_state.shape[2] != weight.shape[1] - 1:  # its state is as wide as the filter needs
        return None
    return convolved(x, weight, bias, conv_state, silu)
