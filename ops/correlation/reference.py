"""Correlation in plain torch, forward and backward.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Sums are
of float32 at least. Backward is stated explicitly, because autograd cannot be called inside a
registered operator. With P the pairs of pixels (p, q) that an output g is the sum of:

    dinput1[p] = Σ_{P ∋ (p, q)} g·input2[q]        dinput2[q] = Σ_{P ∋ (p, q)} g·input1[p]
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.correlation.shapes import Options, check, check_cotangent

__all__ = ["correlation", "correlation_backward"]


def correlation(x1: Tensor, x2: Tensor, *options: int) -> Tensor:
    """out, (b, ph, pw, oh, ow), contiguous."""
    given = Options(*options)
    shape = check("correlation", x1, x2, given)
    frame = _Frame.of(x1, given, shape)
    first, second = frame.padded(x1), frame.padded(x2)
    volume = [frame.empty(first) for _ in range(given.patch_h * given.patch_w)]
    for number, here, there, inside in frame.pairs():
        products = (first[here] * second[there]).sum(1)
        volume[number] = volume[number] + torch.where(inside, products, 0)
    return torch.stack(volume, 1).reshape(shape).to(x1.dtype)


def correlation_backward(
    dout: Tensor, x1: Tensor, x2: Tensor, *options: int
) -> tuple[Tensor, Tensor]:
    """(dinput1, dinput2), each in its input's shape and dtype, contiguous."""
    given = Options(*options)
    shape = check("correlation_backward", x1, x2, given)
    check_cotangent("correlation_backward", dout, x1, shape)
    frame = _Frame.of(x1, given, shape)
    first, second = frame.padded(x1), frame.padded(x2)
    dfirst, dsecond = torch.zeros_like(first), torch.zeros_like(second)
    cotangents = _wide(dout).flatten(1, 2)
    for number, here, there, inside in frame.pairs():
        g = torch.where(inside, cotangents[:, number], 0).unsqueeze(1)
        dfirst[here] += g * second[there]
        dsecond[there] += g * first[here]
    return frame.cropped(dfirst, x1), frame.cropped(dsecond, x2)


_Places = tuple[slice, slice, slice, slice]
"""Pixels of an image (b, c, H, W) with its margins."""


@dataclass(frozen=True)
class _Frame:
    """An image with margins, so wide that each pixel of each pair is in it; less, where negative.

    Attributes:
        options: of the operator.
        margins: at the left, the right, the top and the bottom.
        outputs: rows and columns.
        known: where the image is in its margins, (1, 1, H, W) with them.
    """

    options: Options
    margins: tuple[int, int, int, int]
    outputs: tuple[int, int]
    known: Tensor

    @classmethod
    def of(cls, x: Tensor, o: Options, shape: tuple[int, ...]) -> "_Frame":
        (top, bottom), (left, right) = (
            ((patch - 1) // 2 * step, patch // 2 * step)
            for patch, step in ((o.patch_h, o.dilation_patch_h), (o.patch_w, o.dilation_patch_w))
        )
        margins = (left + o.padding_w, right + o.padding_w, top + o.padding_h, bottom + o.padding_h)
        ones = torch.ones((1, 1, *x.shape[2:]), dtype=torch.bool, device=x.device)
        return cls(o, margins, (shape[3], shape[4]), F.pad(ones, margins))

    def padded(self, x: Tensor) -> Tensor:
        """An image with its margins, of zeros."""
        return F.pad(_wide(x), self.margins)

    def cropped(self, x: Tensor, like: Tensor) -> Tensor:
        """An image without its margins, in the dtype of another one."""
        image = F.pad(x, [-margin for margin in self.margins])
        return image.to(like.dtype).clone(memory_format=torch.contiguous_format)

    def empty(self, like: Tensor) -> Tensor:
        """A sum of nothing, for one displacement, (b, oh, ow)."""
        return like.new_zeros((like.shape[0], *self.outputs))

    def pairs(self) -> Iterator[tuple[int, _Places, _Places, Tensor]]:
        """For each displacement, by number, and tap: pixels of both images, and which are known."""
        o = self.options
        top, left = (o.patch_h - 1) // 2, (o.patch_w - 1) // 2
        for number in range(o.patch_h * o.patch_w):
            i, j = divmod(number, o.patch_w)
            for tap in range(o.kernel_h * o.kernel_w):
                u, v = divmod(tap, o.kernel_w)
                y, x = u * o.dilation_h, v * o.dilation_w
                here = self._at(y + top * o.dilation_patch_h, x + left * o.dilation_patch_w)
                there = self._at(y + i * o.dilation_patch_h, x + j * o.dilation_patch_w)
                yield number, here, there, (self.known[here] & self.known[there])[0]

    def _at(self, y: int, x: int) -> _Places:
        rows, columns = self.outputs
        o = self.options
        return (
            slice(None),
            slice(None),
            slice(y, y + (rows - 1) * o.stride_h + 1, o.stride_h),
            slice(x, x + (columns - 1) * o.stride_w + 1, o.stride_w),
        )


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
