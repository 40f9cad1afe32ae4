"""The convolution as a function and as a layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DepthwiseFunction", "DwConv2d"]


class DepthwiseFunction:
    """Called by `apply`, as the autograd function of that name is; its gradient is torch's."""

    @staticmethod
    def apply(
        x: Tensor, w: Tensor, b: Tensor | None, padding_h: int, padding_w: int, is_bias: bool
    ) -> Tensor:
        """(b, c, h, w), filters (c, 1, kh, kw) and, if `is_bias`, (c,), to (b, c, h', w')."""
        bias = b if is_bias else None
        return F.conv2d(x, w, bias, padding=(padding_h, padding_w), groups=x.shape[1])


class DwConv2d(nn.Module):
    """The same with filters of its own.

    Args:
        num_channel: c.
        kernel_size: (kh, kw).
        padding: in height and width.
        bias: whether there is one; zero at first.
    """

    def __init__(
        self,
        num_channel: int,
        kernel_size: tuple[int, int],
        padding: tuple[int, int],
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.padding_h, self.padding_w = padding
        self.weight = nn.Parameter(torch.randn(num_channel, 1, *kernel_size))
        self.is_bias = bias
        self.bias = nn.Parameter(torch.zeros(num_channel)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return DepthwiseFunction.apply(
            x, self.weight, self.bias, self.padding_h, self.padding_w, self.is_bias
        )
