"""Attention, with all biases of `attn_bias` but those of caches of keys."""

from typing import Any, NoReturn

from torch import Tensor

from fuseport.exporter.shims._placeholder import Placeholder

from . import attn_bias
from ._attention import attend
from .attn_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)

__all__ = [
    "AttentionBias",
    "AttentionOp",
    "AttentionOpBase",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "attn_bias",
    "ck",
    "cutlass",
    "flash",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]


class AttentionOpBase:
    """What a kernel is told by; there is one way to compute here, and none has an effect."""


AttentionOp = Any
ck, cutlass, flash = (
    Placeholder(f"xformers.ops.fmha.{name}") for name in ["ck", "cutlass", "flash"]
)
MemoryEfficientAttentionCkOp = MemoryEfficientAttentionSplitKCkOp = (ck.FwOp, ck.BwOp)
MemoryEfficientAttentionCutlassOp = MemoryEfficientAttentionOp = (cutlass.FwOp, cutlass.BwOp)
MemoryEfficientAttentionCutlassFwdFlashBwOp = (cutlass.FwOp, flash.BwOp)
MemoryEfficientAttentionFlashAttentionOp = (flash.FwOp, flash.BwOp)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    """softmax(scale · query·keyᵀ + bias)·value of each head.

    Args:
        query: (b, l, h, d), of a floating dtype; (b, l, d) for one head; (b, l, g, h, d) for groups
            of heads.
        key: (b, m, h, d), or as query.
        value: (b, m, h, e), or as query.
        attn_bias: (b, h, l, m), added to the scores, also (b·h, l, m) as of older versions, or
            (b, g, h, l, m) for groups; or one of `attn_bias`, or None.
        p: dropout, which the package applies in eval mode, too: must be 0.
        scale: None for 1/√d.
        op: has no effect.
        output_dtype: None for query's.

    Returns:
        (b, l, h, e), contiguous, or as query.

    Raises:
        NotImplementedError: a bias is of another kind.
        ValueError: p is above 0, or shapes do not fit.
    """
    out = attend(query, key, value, attn_bias, p, scale)
    return out if output_dtype is None else out.to(output_dtype)


memory_efficient_attention_forward = memory_efficient_attention


def memory_efficient_attention_forward_requires_grad(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: what it keeps is for a backward pass that is called by hand."""
    _refuse("memory_efficient_attention_forward_requires_grad")


def memory_efficient_attention_backward(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses, as does the forward that goes with it."""
    _refuse("memory_efficient_attention_backward")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} was called on fuseport's stand-in for xformers, which has it only as a whole: "
        "call memory_efficient_attention, which autograd has the gradients of"
    )
