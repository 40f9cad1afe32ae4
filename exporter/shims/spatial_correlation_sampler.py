"""Stands in for `spatial_correlation_sampler`, of Pytorch-Correlation-extension."""

from torch import Tensor, nn

from fuseport.ops.correlation import correlation

__all__ = [
    "SpatialCorrelationSampler",
    "SpatialCorrelationSamplerFunction",
    "spatial_correlation_sample",
]

Pair = int | tuple[int, int]


def spatial_correlation_sample(
    input1: Tensor,
    input2: Tensor,
    kernel_size: Pair = 1,
    patch_size: Pair = 1,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    dilation_patch: Pair = 1,
) -> Tensor:
    """`fuseport.ops.correlation`: (b, c, h, w) twice to (b, patch_h, patch_w, h', w')."""
    return correlation(
        input1, input2, kernel_size, patch_size, stride, padding, dilation, dilation_patch
    )


class SpatialCorrelationSamplerFunction:
    """Called by `apply`, as the autograd function of that name is; its gradient is the op's."""

    apply = staticmethod(spatial_correlation_sample)


class SpatialCorrelationSampler(nn.Module):
    """`spatial_correlation_sample` with these sizes."""

    def __init__(
        self,
        kernel_size: Pair = 1,
        patch_size: Pair = 1,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        dilation_patch: Pair = 1,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.patch_size = patch_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.dilation_patch = dilation_patch

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """(b, c, h, w) twice to (b, patch_h, patch_w, h', w')."""
        return spatial_correlation_sample(
            input1,
            input2,
            self.kernel_size,
            self.patch_size,
            self.stride,
            self.padding,
            self.dilation,
            self.dilation_patch,
        )
