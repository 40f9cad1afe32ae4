"""The sum of walks in plain torch, forward and backward; `cross_scan.reference` says how."""

from torch import Tensor

from fuseport.ops.cross_scan.reference import merge, scan
from fuseport.ops.cross_scan.shapes import check_image, check_walks

__all__ = ["cross_merge", "cross_merge_backward"]


def cross_merge(ys: Tensor) -> Tensor:
    """out, (b, C, H, W)."""
    check_walks("cross_merge", "ys", ys)
    return merge(ys)


def cross_merge_backward(dout: Tensor) -> Tensor:
    """dys, (b, 4, C, H, W)."""
    check_image("cross_merge_backward", "dout", dout)
    return scan(dout)
