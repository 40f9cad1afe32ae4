"""The norm without the mean."""

from .layernorm import Norm

__all__ = ["RMSNorm"]


class RMSNorm(Norm):
    """x · weight / √(mean(x²) + eps); arguments are those of `LayerNorm`, and it has no bias."""

    kind = "RMSNorm"
