"""Stands in for `rotary_emb`, the CUDA extension of flash_attn 1 and early 2."""

from torch import Tensor

__all__ = ["apply_rotary"]


def apply_rotary(
    x1: Tensor,
    x2: Tensor,
    cos: Tensor,
    sin: Tensor,
    out1: Tensor,
    out2: Tensor,
    conj: bool,
) -> None:
    """Turn the pairs of (…, r/2) x1 and x2 by the angles, or back, into out1 and out2.

    out1 = x1·cos - x2·sin and out2 = x1·sin + x2·cos, computed in float32 as the kernel does; the
    outputs may be the inputs. Source: csrc/rotary of flash-attention.
    """
    wide = x1.float() if x1.element_size() < 4 else x1
    other, cosine, sine = (t.to(wide.dtype) for t in (x2, cos, sin))
    if conj:
        sine = -sine
    first, second = wide * cosine - other * sine, wide * sine + other * cosine
    out1.copy_(first)
    out2.copy_(second)
