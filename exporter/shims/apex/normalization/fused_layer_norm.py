"""Norms over the last dimensions, computed in float32 at least and rounded once.

RMS norms are over the registered op. `memory_efficient` has no effect.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.shims._dtypes import beside, wide
from fuseport.ops.rms_norm import rms_norm

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """The layer norm over the last dimensions, in input's dtype.

    Args:
        input: (…, *normalized_shape), of a floating dtype.
        weight: normalized_shape.
        bias: normalized_shape.
        normalized_shape: the last dimensions, or the last one.
        eps: under the root.
        memory_efficient: has no effect.
    """
    return _layer_norm(input, weight, bias, normalized_shape, eps).to(input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_layer_norm_affine` without weight and bias."""
    return _layer_norm(input, None, None, normalized_shape, eps).to(input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` in weight's dtype."""
    return _layer_norm(input, weight, bias, normalized_shape, eps).to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` without the mean and the bias: input · weight / √(mean² + eps)."""
    dims = len(_shape(normalized_shape))
    out: Tensor = rms_norm(input.flatten(-dims), beside(weight, input).flatten(), eps)
    return out.reshape(input.shape)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` without a weight."""
    weight = input.new_ones(_shape(normalized_shape))
    return fused_rms_norm_affine(input, weight, normalized_shape, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_rms_norm_affine` in weight's dtype."""
    value = input.to(wide(input, weight))
    return fused_rms_norm_affine(value, weight, normalized_shape, eps).to(weight.dtype)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """`fused_rms_norm_affine`, or `fused_rms_norm`."""
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return fused_rms_norm_affine(input, weight, normalized_shape, eps)


class FusedLayerNormAffineFunction:
    """Called by `apply`, as the autograd functions of these names are; so the others below."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    """Without weight and bias."""

    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    """Without the mean."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction:
    """Without the mean and a weight."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNorm(nn.Module):
    """An RMS norm over the last dimensions.

    Args:
        normalized_shape: the last dimensions, or the last one.
        eps: under the root.
        elementwise_affine: whether there is a weight.
        memory_efficient: has no effect.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(_shape(normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        if self.elementwise_affine:
            nn.init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same."""
        return manual_rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Its arguments."""
        return f"{self.normalized_shape}, eps={self.eps}, affine={self.elementwise_affine}"


class FusedLayerNorm(FusedRMSNorm):
    """A layer norm over the last dimensions; arguments are those of `FusedRMSNorm`."""

    def reset_parameters(self) -> None:
        """Ones, and zeros."""
        super().reset_parameters()
        bias = torch.zeros(self.normalized_shape) if self.elementwise_affine else None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same."""
        out = _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps)
        return out.to(input.dtype)


class _Mixed(FusedRMSNorm):
    """What norms in the dtype of their weight are made with: they have one."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_without_weight(type(self), kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """`FusedLayerNorm` in the dtype of its weight.

    Raises:
        RuntimeError: elementwise_affine is False.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same."""
        out = _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps)
        return out.to(self.weight.dtype)


class MixedFusedRMSNorm(_Mixed):
    """`FusedRMSNorm` in the dtype of its weight.

    Raises:
        RuntimeError: elementwise_affine is False.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same."""
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps
        )


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape, eps: float
) -> Tensor:
    real = wide(*(t for t in (x, weight, bias) if t is not None))
    scale, shift = (None if t is None else t.to(real) for t in (weight, bias))
    return F.layer_norm(x.to(real), _shape(shape), scale, shift, eps)


def _shape(given: Shape) -> list[int]:
    return [given] if isinstance(given, int) else [*given]


def _refuse_without_weight(of: type, options: dict[str, Any]) -> None:
    if not options.pop("elementwise_affine", True):
        raise RuntimeError(f"apex's {of.__name__} has a weight: elementwise_affine is False")
