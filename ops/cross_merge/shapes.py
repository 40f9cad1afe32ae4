"""Shapes, dtypes and strides of the sum of walks; `cross_scan.shapes` has the checks."""

from torch import Tensor

from fuseport.ops.cross_scan.shapes import check_image, check_walks, merged, walks

__all__ = ["fake_merge", "fake_merge_backward"]


def fake_merge(ys: Tensor) -> Tensor:
    """The empty output of `fuseport::cross_merge`."""
    check_walks("cross_merge", "ys", ys)
    return merged(ys)


def fake_merge_backward(dout: Tensor) -> Tensor:
    """The empty output of `fuseport::cross_merge_backward`."""
    check_image("cross_merge_backward", "dout", dout)
    return walks(dout)
