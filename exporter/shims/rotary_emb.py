"""Stands in for `rotary_emb`, the CUDA extension of flash_attn 1 and early 2."""

import torch
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

    In an autograd function's forward torch does not count what is written, as it does not hear of a
    kernel's writing: callers (TinyLlama) turn queries in place that are a part of a projection, of
    which they go on to take the values.
    """
    wide = x1.float() if x1.element_size() < 4 else x1
    other, cosine, sine = (t.to(wide.dtype) for t in (x2, cos, sin))
    if conj:
        sine = -sine
    first, second = wide * cosine - other * sine, wide * sine + other * cosine
    for out, value in ((out1, first), (out2, second)):
        if torch.is_grad_enabled():
            out.copy_(value)
        else:
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(out):
                out.copy_(value)
