"""Softmax of scaled scores under masks, as apex's and Megatron-LM's extensions compute it."""

import torch
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide

__all__ = ["causal", "gradient", "masked", "scaled"]

_MASKED = -10000.0
"""The score of what a mask hides."""

_NEAR = 0.1  # above that, where a row counts as hidden


def scaled(x: Tensor, scale: float | Tensor) -> Tensor:
    """softmax(scale · x) over the last dimension, computed in float32 at least.

    Args:
        x: of a floating dtype.
        scale: rounded to x's dtype first, as the kernels do.

    Returns:
        Of the shape and dtype of x.
    """
    return _scores(x, scale).softmax(-1).to(x.dtype)


def causal(x: Tensor, scale: float | Tensor) -> Tensor:
    """`scaled` of (…, l, l), each row up to the diagonal; zero behind it."""
    scores = _scores(x, scale)
    steps = torch.arange(x.shape[-1], device=x.device)
    later = steps > torch.arange(x.shape[-2], device=x.device).unsqueeze(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1).to(x.dtype)


def masked(x: Tensor, mask: Tensor, scale: float | Tensor, *, clamped: bool = False) -> Tensor:
    """`scaled` with scores of -10,000 where mask is 1, and zeros in a row of nothing else.

    Args:
        x: (b, h, q, k).
        mask: (b, 1, q, k) or (1, 1, q, k), bool or uint8.
        scale: as of `scaled`.
        clamped: a row counts as hidden as well where no score is above -9999.9.

    Raises:
        TypeError: mask is of another dtype, which the kernels would read byte by byte.
    """
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"a mask of a fused softmax is bool or uint8, not {mask.dtype}")
    scores = _scores(x, scale).masked_fill(mask == 1, _MASKED)
    top = scores.amax(-1, keepdim=True)
    hidden = top < _MASKED + _NEAR if clamped else top == _MASKED
    return scores.softmax(-1).masked_fill(hidden, 0.0).to(x.dtype)


def gradient(cotangent: Tensor, out: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """That of x, by that of the result: scale · out · (cotangent - Σ cotangent · out)."""
    real = wide(cotangent, out)
    weights = out.to(real)
    weighted = weights * cotangent.to(real)
    found: Tensor = scale * (weighted - weights * weighted.sum(-1, keepdim=True))
    return found.to(cotangent.dtype)


def _scores(x: Tensor, scale: float | Tensor) -> Tensor:
    real = wide(x)
    factor = torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    return x.to(real) * factor.to(real)
