"""The convolution as a layer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functions import DCNv4Function

__all__ = ["CenterFeatureScaleModule", "DCNv4"]

_PADDED = 8  # numbers that the kernel reads at a time


class CenterFeatureScaleModule(nn.Module):
    """How much of a pixel's own features there is in each group's."""

    def forward(
        self,
        query: Tensor,
        center_feature_scale_proj_weight: Tensor,
        center_feature_scale_proj_bias: Tensor,
    ) -> Tensor:
        """(…, channels), (groups, channels) and (groups,) to (…, groups)."""
        scale = F.linear(query, center_feature_scale_proj_weight, center_feature_scale_proj_bias)
        return scale.sigmoid()


class DCNv4(nn.Module):
    """Of a map of pixels in a row; offsets and masks are a linear function of each.

    Args:
        channels: in and out, in `group` groups of a multiple of 16.
        kernel_size, stride, pad, dilation, offset_scale, remove_center: of the convolution.
        dw_kernel_size: of a depthwise convolution of what offsets are made of, if there is one.
        center_feature_scale: whether each group mixes in what it was before.
        output_bias: whether the last linear layer has one.
        without_pointwise: whether there are no linear layers around.
    """

    def __init__(
        self,
        channels: int = 64,
        kernel_size: int = 3,
        stride: int = 1,
        pad: int = 1,
        dilation: int = 1,
        group: int = 4,
        offset_scale: float = 1.0,
        dw_kernel_size: int | None = None,
        center_feature_scale: bool = False,
        remove_center: bool = False,
        output_bias: bool = True,
        without_pointwise: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if channels % group:
            raise ValueError(f"channels must be divisible by group, but got {channels} and {group}")
        assert channels // group % 16 == 0
        self.channels, self.group, self.group_channels = channels, group, channels // group
        self.kernel_size, self.stride, self.dilation, self.pad = kernel_size, stride, dilation, pad
        self.offset_scale = offset_scale
        self.dw_kernel_size = dw_kernel_size
        self.center_feature_scale = center_feature_scale
        self.remove_center = int(remove_center)
        self.without_pointwise = without_pointwise
        self.K = group * (kernel_size * kernel_size - self.remove_center)
        if dw_kernel_size is not None:
            padding = (dw_kernel_size - 1) // 2
            self.offset_mask_dw = nn.Conv2d(
                channels, channels, dw_kernel_size, padding=padding, groups=channels
            )
        self.offset_mask = nn.Linear(channels, math.ceil(self.K * 3 / _PADDED) * _PADDED)
        if not without_pointwise:
            self.value_proj = nn.Linear(channels, channels)
            self.output_proj = nn.Linear(channels, channels, bias=output_bias)
        self._reset_parameters()
        if center_feature_scale:
            self.center_feature_scale_proj_weight = nn.Parameter(torch.zeros(group, channels))
            self.center_feature_scale_proj_bias = nn.Parameter(torch.zeros(group))
            self.center_feature_scale_module = CenterFeatureScaleModule()

    def _reset_parameters(self) -> None:
        nn.init.zeros_(self.offset_mask.weight)
        nn.init.zeros_(self.offset_mask.bias)
        if not self.without_pointwise:
            for layer in (self.value_proj, self.output_proj):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, input: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """(b, pixels, channels) to as many; `shape` is (height, width), which else are equal."""
        batch, pixels, channels = input.shape
        height, width = shape if shape is not None else [int(pixels**0.5)] * 2
        x = input if self.without_pointwise else self.value_proj(input)
        x = x.reshape(batch, height, width, -1)
        of_offsets = input
        if self.dw_kernel_size is not None:
            image = input.view(batch, height, width, channels).permute(0, 3, 1, 2)
            of_offsets = self.offset_mask_dw(image).permute(0, 2, 3, 1).flatten(1, 2)
        y = DCNv4Function.apply(
            x,
            self.offset_mask(of_offsets).reshape(batch, height, width, -1),
            *[self.kernel_size] * 2,
            *[self.stride] * 2,
            *[self.pad] * 2,
            *[self.dilation] * 2,
            self.group,
            self.group_channels,
            self.offset_scale,
            256,
            self.remove_center,
        )
        if self.center_feature_scale:
            scale = self.center_feature_scale_module(
                y, self.center_feature_scale_proj_weight, self.center_feature_scale_proj_bias
            )
            scale = scale.repeat_interleave(self.group_channels, -1)
            y = y * (1 - scale) + x * scale
        y = y.view(batch, pixels, -1)
        return y if self.without_pointwise else self.output_proj(y)
