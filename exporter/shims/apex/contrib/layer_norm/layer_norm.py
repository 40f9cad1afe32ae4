"""A layer norm over the last dimension, of any size."""

import torch
from torch import Tensor, nn

from ...normalization.fused_layer_norm import fused_layer_norm_affine

__all__ = ["FastLayerNorm", "FastLayerNormFN"]


class FastLayerNormFN:
    """Called by `apply`, as the autograd function of this name is."""

    @staticmethod
    def apply(
        x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
    ) -> Tensor:
        """The norm of (…, d) with (d,) and (d,), in x's dtype."""
        return fused_layer_norm_affine(x, gamma, beta, gamma.shape, epsilon)


def _fast_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False
) -> Tensor:
    return FastLayerNormFN.apply(x, weight, bias, epsilon)


class FastLayerNorm(nn.Module):
    """A layer norm over the last dimension.

    Args:
        hidden_size: the last dimension.
        eps: under the root.
        memory_efficient: has no effect.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, and zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden_size) → the same."""
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon)
