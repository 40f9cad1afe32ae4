"""RMS norms over the registered op; unlike the package's they have gradients."""

import torch
from torch import Tensor, nn

from fuseport.exporter.shims._dtypes import beside
from fuseport.ops.rms_norm import rms_norm as op

__all__ = ["RMSNorm", "rms_norm", "rms_norm_add"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x · weight / √(mean(x²) + eps) over the last dimension, in x's dtype; weight (d,) or None."""
    weight = x.new_ones(x.shape[-1]) if weight is None else beside(weight, x)
    return op(x, weight, eps)


def rms_norm_add(x: Tensor, y: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """`rms_norm` of x + y, which x is afterwards."""
    return rms_norm(x.add_(y), weight, eps)


class RMSNorm(nn.Module):
    """An RMS norm over the last dimension.

    Args:
        dim: the last dimension.
        include_weight: whether there is a weight.
        eps: under the root.
    """

    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if include_weight else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → the same."""
        return rms_norm(x, self.weight, self.eps)

    def increment_and_forward_(self, x: Tensor, y: Tensor) -> Tensor:
        """`rms_norm_add` with this norm's weight."""
        return rms_norm_add(x, y, self.weight, self.eps)
