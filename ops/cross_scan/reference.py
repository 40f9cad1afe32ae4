"""Walks over an image in plain torch, and their sum: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. A walk's
H·W numbers are in the order of the walk, whatever the shape (H, W) says. Walking and summing are
each other's gradients; a sum is of float32 at least, and rounded once.
"""

import torch
from torch import Tensor

from fuseport.ops.cross_scan.shapes import check_image, check_walks

__all__ = ["cross_scan", "cross_scan_backward", "merge", "scan"]


def cross_scan(x: Tensor) -> Tensor:
    """out, (b, 4, C, H, W)."""
    check_image("cross_scan", "x", x)
    return scan(x)


def cross_scan_backward(dout: Tensor) -> Tensor:
    """dx, (b, C, H, W)."""
    check_walks("cross_scan_backward", "dout", dout)
    return merge(dout)


def scan(x: Tensor) -> Tensor:
    """(b, C, H, W) walked by rows, by columns, and both reversed: (b, 4, C, H, W)."""
    b, channels, height, width = x.shape
    forward = torch.stack([x.flatten(2), x.mT.flatten(2)], 1)
    both = torch.cat([forward, forward.flip(3)], 1)
    return both.view(b, 4, channels, height, width)


def merge(ys: Tensor) -> Tensor:
    """The sum of the four walks, (b, 4, C, H, W), at each pixel: (b, C, H, W)."""
    b, _, channels, height, width = ys.shape
    wide = torch.float64 if ys.dtype == torch.float64 else torch.float32
    flat = ys.to(wide).flatten(3)
    by_rows, by_columns = (flat[:, :2] + flat[:, 2:].flip(3)).unbind(1)
    turned = by_columns.reshape(b, channels, width, height).mT
    total = by_rows.reshape(b, channels, height, width) + turned
    return total.to(ys.dtype).clone(memory_format=torch.contiguous_format)
