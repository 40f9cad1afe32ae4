"""Norms as layers of their own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._compute import autocast_dtype, normalise
from .._refused import plain
from .base import TransformerEngineBaseModule

__all__ = ["LayerNorm", "Norm"]


class Norm(TransformerEngineBaseModule):
    """A norm over the last dimensions, in its weight's dtype, or that of `torch.autocast`.

    Args:
        normalized_shape: the last dimensions, or the last one.
        eps: under the root.
        sequence_parallel: has no effect.
        params_dtype: of the parameters, as dtype.
        zero_centered_gamma: whether 1 is added to the weight.
        hidden_size: the last dimension, where normalized_shape is None.
        device: where parameters are; None for torch's default.
        dtype: of the parameters; None for torch's default.
        tuning: options that have no effect.

    Raises:
        RuntimeError: both or none of two names of one argument are given.
        TypeError: an option is unknown.
    """

    kind = "LayerNorm"
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **tuning: Any,
    ) -> None:
        super().__init__()
        plain(self.kind, tuning)
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError(f"{self.kind}: give one of normalized_shape and hidden_size")
        if params_dtype is not None and dtype is not None:
            raise RuntimeError(f"{self.kind}: give one of dtype and params_dtype")
        given = hidden_size if normalized_shape is None else normalized_shape
        shape = (given,) if isinstance(given, int) else tuple(given or ())
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        dtype = params_dtype or dtype
        first = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self.add_parameter("weight", shape, first, device, dtype)
        if self.kind == "LayerNorm":
            self.add_parameter("bias", shape, nn.init.zeros_, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same."""
        dtype = autocast_dtype(x) or self.weight.dtype
        bias = self.bias.to(dtype) if self.kind == "LayerNorm" else None
        weight = self.weight.to(dtype)
        return normalise(x.to(dtype), weight, bias, self.eps, self.zero_centered_gamma, self.kind)


class LayerNorm(Norm):
    """The layer norm."""
