"""Stands in for `upfirdn2d_ext`, with which BasicSR resamples images as StyleGAN2 does."""

import torch.nn.functional as F
from torch import Tensor

__all__ = ["upfirdn2d"]


def upfirdn2d(
    input: Tensor,
    kernel: Tensor,
    up_x: int,
    up_y: int,
    down_x: int,
    down_y: int,
    pad_x0: int,
    pad_x1: int,
    pad_y0: int,
    pad_y1: int,
) -> Tensor:
    """Images with zeros between their places, padded, filtered, and every so many-th place of that.

    T. Karras et al., "Analyzing and Improving the Image Quality of StyleGAN", 2020, section B.

    Args:
        input: (n, h, w, m), each of n·m images by itself.
        kernel: (kh, kw).
        up_x, up_y: there are so many places for each before, the others zero.
        down_x, down_y: of so many places the first stays.
        pad_x0, pad_x1, pad_y0, pad_y1: left, right, above, below; what is negative is cut off.

    Returns:
        (n, h', w', m), with h' = (h·up_y + pad_y0 + pad_y1 - kh) // down_y + 1, and w' likewise.
    """
    n, h, w, m = input.shape
    x = input.permute(0, 3, 1, 2).reshape(n * m, 1, h, 1, w, 1)
    x = F.pad(x, (0, up_x - 1, 0, 0, 0, up_y - 1)).reshape(n * m, 1, h * up_y, w * up_x)
    x = F.pad(x, (pad_x0, pad_x1, pad_y0, pad_y1))
    x = F.conv2d(x, kernel.to(x.dtype).flip(0, 1)[None, None], stride=(down_y, down_x))
    return x.reshape(n, m, *x.shape[2:]).permute(0, 2, 3, 1)
