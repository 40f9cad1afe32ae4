"""apex's extension for norms over the last dimensions, n rows of them, with its backward passes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._gradients import differentiated
from fuseport.exporter.shims.apex.normalization import fused_layer_norm as norms

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]


def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, epsilon: float
) -> list[Tensor]:
    """`fused_layer_norm_affine`, and means and reciprocal deviations, (n,), float32 or wider."""
    out = norms.fused_layer_norm_affine(input, weight, bias, normalized_shape, epsilon)
    return [out, *_statistics(input, normalized_shape, epsilon)]


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, epsilon: float
) -> list[Tensor]:
    """`forward_affine` in weight's dtype."""
    out = norms.mixed_dtype_fused_layer_norm_affine(input, weight, bias, normalized_shape, epsilon)
    return [out, *_statistics(input, normalized_shape, epsilon)]


def forward(input: Tensor, normalized_shape: Sequence[int], epsilon: float) -> list[Tensor]:
    """`forward_affine` without weight and bias."""
    out = norms.fused_layer_norm(input, normalized_shape, epsilon)
    return [out, *_statistics(input, normalized_shape, epsilon)]


def rms_forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, epsilon: float
) -> list[Tensor]:
    """`fused_rms_norm_affine`, and reciprocal roots of mean squares, (n,), float32 or wider."""
    out = norms.fused_rms_norm_affine(input, weight, normalized_shape, epsilon)
    return [out, _reciprocal(_rows(input, normalized_shape), epsilon)]


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, epsilon: float
) -> list[Tensor]:
    """`rms_forward_affine` in weight's dtype."""
    out = norms.mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, epsilon)
    return [out, _reciprocal(_rows(input, normalized_shape), epsilon)]


def rms_forward(input: Tensor, normalized_shape: Sequence[int], epsilon: float) -> list[Tensor]:
    """`rms_forward_affine` without a weight."""
    out = norms.fused_rms_norm(input, normalized_shape, epsilon)
    return [out, _reciprocal(_rows(input, normalized_shape), epsilon)]


def backward_affine(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> list[Any]:
    """Gradients of input, weight and bias by that of the norm.

    Raises:
        NotImplementedError: memory_efficient is True, and so what is given is the output.
    """
    _refuse(memory_efficient)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm = norms.mixed_dtype_fused_layer_norm_affine
        return norm(x, weight, bias, normalized_shape, epsilon)

    return differentiated(function, [input_or_output, weight, bias], dout)


def backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    epsilon: float,
    memory_efficient: bool = False,
) -> Tensor:
    """The gradient of input; raises as `backward_affine`."""
    _refuse(memory_efficient)
    return _by_input(norms.fused_layer_norm, dout, input_or_output, normalized_shape, epsilon)


def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> list[Any]:
    """Gradients of input and weight; raises as `backward_affine`."""
    _refuse(memory_efficient)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        norm = norms.mixed_dtype_fused_rms_norm_affine
        return norm(x, weight, normalized_shape, epsilon)

    return differentiated(function, [input_or_output, weight], dout)


def rms_backward(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    epsilon: float,
    memory_efficient: bool = False,
) -> Tensor:
    """The gradient of input; raises as `backward_affine`."""
    _refuse(memory_efficient)
    return _by_input(norms.fused_rms_norm, dout, input_or_output, normalized_shape, epsilon)


def _by_input(
    norm: Callable[..., Tensor], dout: Tensor, x: Tensor, shape: Sequence[int], eps: float
) -> Tensor:
    found: Tensor = differentiated(lambda x: norm(x, shape, eps), [x], dout)[0]
    return found


def _statistics(x: Tensor, shape: Sequence[int], eps: float) -> list[Tensor]:
    rows = _rows(x, shape)
    mean = rows.mean(1)
    return [mean, _reciprocal(rows - mean[:, None], eps)]


def _reciprocal(rows: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.square().mean(1) + eps)


def _rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.detach().to(wide(x)).flatten(-len(shape)).flatten(0, -2)


def _refuse(memory_efficient: bool) -> None:
    if memory_efficient:
        raise NotImplementedError(
            "fuseport's stand-in for fused_layer_norm_cuda differentiates by the input, not by the "
            "output: make the norm without memory_efficient"
        )
