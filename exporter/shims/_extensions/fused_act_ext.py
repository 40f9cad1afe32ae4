"""Stands in for `fused_act_ext`, BasicSR's bias and leaky ReLU in one, as StyleGAN2 has them."""

import torch
from torch import Tensor

__all__ = ["fused_bias_act"]

_LINEAR, _LEAKY_RELU = 1, 3


def fused_bias_act(
    input: Tensor, bias: Tensor, refer: Tensor, act: int, grad: int, alpha: float, scale: float
) -> Tensor:
    """An activation of x + bias, times a scale, or its derivative by x, or by x twice.

    Args:
        input: x, (n, c, …), or with `grad` the gradient that came in.
        bias: (c,), or empty for none.
        refer: with `grad`, the output of the function itself, or its like; else empty.
        act: 1, the identity, or 3, leaky ReLU.
        grad: which derivative: 0, 1 or 2.
        alpha: the slope of leaky ReLU below zero.
        scale: of the result.

    Returns:
        Of the shape of x.

    Raises:
        NotImplementedError: another activation.
    """
    if act not in (_LINEAR, _LEAKY_RELU):
        raise NotImplementedError(f"fused_bias_act: act {act}: there are 1, linear, and 3, lrelu")
    x = input
    if bias.numel():
        x = x + bias.view(1, -1, *[1] * (x.dim() - 2))
    if grad == 2:
        return torch.zeros_like(x)
    if act == _LEAKY_RELU:
        x = torch.where((refer if grad else x) > 0, x, x * alpha)
    return x * scale
