"""Pooling, nearest upsampling and volumes' samples, with gradients, in operators that ONNX has.

Which elements belong together is computed from sizes, by axis. Averages and nearest upsampling are
linear: their gradients are products with a matrix for each axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from fuseport.exporter.program.portable._antialiased import antialiased
from fuseport.exporter.program.portable.volumes import grid_sampler_3d
from fuseport.exporter.program.rewriting import Table

__all__ = ["ADAPTIVE", "DIVIDED", "RESAMPLING", "even"]

aten = torch.ops.aten


def _positions(count: Any, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """The product of every row of `x` along `dim` with a matrix."""
    return torch.matmul(x.transpose(dim, -1), matrix).transpose(dim, -1)


def _shaped(t: Tensor, dim: int) -> Tensor:
    """A vector as a tensor that broadcasts along the dimension `dim`, which is negative."""
    return t.reshape(-1, *(1 for _ in range(-dim - 1)))


def even(node: fx.Node) -> bool:
    """Whether a node of `ADAPTIVE` has windows of one length, which torch.onnx itself takes.

    But not averages in three dimensions; and maxima in two and three only if torch decomposes them,
    as it does from 2.13 on.
    """
    x, counts, *_ = node.args
    if node.target in _MAXIMA and node.target not in decomposition_table:
        return False
    if ADAPTIVE[node.target] is _adaptive_avg_pool and len(counts) == 3:  # type: ignore[arg-type]
        return False
    sizes = x.meta["val"].shape[-len(counts) :]  # type: ignore[union-attr, arg-type]
    return all(
        isinstance(size, int) and isinstance(count, int) and size % count == 0
        for size, count in zip(sizes, counts, strict=True)  # type: ignore[arg-type]
    )


def _windows(size: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where the windows of adaptive pooling begin and end: `count` of them over `size` elements."""
    i = _positions(count, like)
    # Not negative: what torch means by floor, and ONNX by division, are one.
    begin = torch.div(i * size, count, rounding_mode="trunc")
    end = torch.div((i + 1) * size + count - 1, count, rounding_mode="trunc")
    return begin, end


def _gathered(x: Tensor, dim: int, count: int) -> tuple[Tensor, Tensor]:
    """Adaptive windows of `x` along a new dimension after `dim`, negative; and their lengths.

    Shorter windows repeat their last element.
    """
    # A size may be symbolic: no window is longer than this, whatever it is.
    longest = x.shape[dim] // count + 2
    begin, end = _windows(x.shape[dim], count, x)
    index = torch.minimum(begin[:, None] + _positions(longest, x), end[:, None] - 1)
    taken = aten.index_select.default(x, dim, index.flatten())
    return taken.unflatten(dim, (count, longest)), end - begin


def _adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    for axis, count in enumerate(output_size):
        dim = axis - len(output_size)
        taken, lengths = _gathered(x, dim, count)
        inside = _positions(taken.shape[dim], x) < lengths[:, None]
        inside = inside.reshape(*inside.shape, *(1 for _ in range(-dim - 1)))
        total = torch.where(inside, taken, torch.zeros_like(taken)).sum(dim)
        x = total / _shaped(lengths.to(x.dtype), dim)
    return x


def _adaptive_avg_pool_backward(axes: int) -> Callable[[Tensor, Tensor], Tensor]:
    def backward(cotangent: Tensor, x: Tensor) -> Tensor:
        for dim in range(-axes, 0):
            begin, end = _windows(x.shape[dim], cotangent.shape[dim], x)
            at = _positions(x.shape[dim], x)
            inside = (at >= begin[:, None]) & (at < end[:, None])
            weights = inside.to(x.dtype) / (end - begin)[:, None].to(x.dtype)
            cotangent = _along(cotangent, dim, weights)
        return cotangent

    return backward


def _adaptive_max_pool(axes: int) -> Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]:
    def pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
        sizes = x.shape[-axes:]
        places = _positions(math.prod(sizes), x).reshape(sizes)
        taken = x
        for axis, count in enumerate(output_size):
            taken, _ = _gathered(taken, axis - axes, count)
        for axis, count in enumerate(output_size):
            places, _ = _gathered(places, axis - axes, count)
        order = [*range(0, 2 * axes, 2), *range(1, 2 * axes, 2)]
        lead = taken.dim() - 2 * axes
        taken = taken.permute(*range(lead), *(lead + i for i in order)).flatten(lead + axes)
        places = places.permute(*order).flatten(axes).expand(taken.shape)
        # The first of those that tie, as torch takes it: where windows repeat their last element,
        # the repeated ones come after.
        # Dimensions from the front: onnx's evaluator gathers along no others.
        last = taken.dim() - 1
        best = taken.argmax(last, keepdim=True)
        values = taken.gather(last, best).squeeze(last)
        return values, places.gather(last, best).squeeze(last)

    return pool


def _max_backward(axes: int) -> Callable[..., Tensor]:
    """Of maxima whose places are known: indices into the last `axes` dimensions, flattened."""

    def backward(cotangent: Tensor, x: Tensor, *rest: Any) -> Tensor:
        # What torch.onnx makes of MaxPool counts within a channel; but onnx's own evaluator numbers
        # Indices otherwise in windows of size 1, and it counts through all channels there.
        count = torch.full((), math.prod(x.shape[-axes:]), dtype=torch.int64)
        places = torch.remainder(rest[-1], count)
        flat = torch.zeros_like(x).flatten(-axes)
        scattered = flat.scatter_add(-1, places.flatten(-axes), cotangent.flatten(-axes))
        return scattered.reshape(x.shape)

    return backward


def _counts(
    size: Any, count: Any, kernel: int, stride: int, padding: int, padded: bool, like: Tensor
) -> Tensor:
    """How many elements, of the padding too if `padded`, are in each window along an axis."""
    begin = _positions(count, like) * stride - padding
    end = torch.clamp(begin + kernel, max=size + padding)
    if not padded:
        begin, end = torch.clamp(begin, min=0), torch.clamp(end, max=size)
    return end - begin


def _avg_pool_backward(axes: int) -> Callable[..., Tensor]:
    def backward(
        cotangent: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Tensor:
        stride = stride or kernel  # an empty list stands for the kernel
        for axis in range(axes):
            dim, size, count = axis - axes, x.shape[axis - axes], cotangent.shape[axis - axes]
            options = kernel[axis], stride[axis], padding[axis]
            begin = _positions(count, x) * stride[axis] - padding[axis]
            at = _positions(size, x)
            inside = (at >= begin[:, None]) & (at < begin[:, None] + kernel[axis])
            weights = inside.to(x.dtype)
            if divisor_override is None:
                counts = _counts(size, count, *options, count_include_pad, x)
                weights = weights / counts[:, None].to(x.dtype)
            cotangent = _along(cotangent, dim, weights)
        return cotangent if divisor_override is None else cotangent / divisor_override

    return backward


def _upsample_nearest_backward(axes: int, exact: bool) -> Callable[..., Tensor]:
    def backward(
        cotangent: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: Any
    ) -> Tensor:
        for axis in range(axes):
            dim, size, count = axis - axes, input_size[axis - axes], cotangent.shape[axis - axes]
            scale = scales[axis] if axis < len(scales) else None
            # In float32, as torch computes it.
            step = torch.full((), 1.0 / scale if scale else 0.0, dtype=torch.float32)
            if not scale:
                step = torch.full((), size, dtype=torch.float32) / count
            place = _positions(count, cotangent).to(torch.float32) + (0.5 if exact else 0.0)
            index = torch.clamp((place * step).floor().to(torch.int64), max=size - 1)
            weights = index[:, None] == _positions(size, cotangent)
            cotangent = _along(cotangent, dim, weights.to(cotangent.dtype))
        return cotangent

    return backward


def _avg_pool_of_divisor(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = 0,  # type: ignore[assignment]
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Sums by a convolution: torch.onnx forgets the divisor."""
    if ceil_mode:
        raise ValueError("average pooling with divisor_override and ceil_mode has no ONNX form")
    axes = len(kernel)
    padding = [padding] * axes if isinstance(padding, int) else padding
    channels = x.shape[-axes - 1]
    weight = x.new_ones((1, 1, *kernel)).expand(channels, 1, *kernel)
    batch = x if x.dim() == axes + 2 else x.unsqueeze(0)
    each, none = [1] * axes, [0] * axes
    total: Tensor = aten.convolution.default(
        batch, weight, None, stride or kernel, padding, each, False, none, channels
    )
    mean = total / (divisor_override or math.prod(kernel))
    return mean if x.dim() == axes + 2 else mean.squeeze(0)


_MAXIMA = (aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)

ADAPTIVE: Table = {
    aten.adaptive_max_pool1d.default: _adaptive_max_pool(1),
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool,
    aten.adaptive_avg_pool3d.default: _adaptive_avg_pool,
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool,
    aten._adaptive_avg_pool3d.default: _adaptive_avg_pool,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool(2),
    aten.adaptive_max_pool3d.default: _adaptive_max_pool(3),
}
"""For windows of several lengths, or of lengths that are not known: see `even`."""

DIVIDED: Table = {
    aten.avg_pool2d.default: _avg_pool_of_divisor,
    aten.avg_pool3d.default: _avg_pool_of_divisor,
}
"""For average pooling with a divisor of its own, the last argument."""


def _grid_sampler(x: Tensor, *arguments: Any) -> Any:
    # Of volumes ONNX has it from opset 20 on, and few runtimes.
    return grid_sampler_3d(x, *arguments) if x.dim() == 5 else NotImplemented


def _antialiased(taps: int, to_a_size: OpOverload) -> Callable[..., Any]:
    by_factors = antialiased(taps)

    def resize(
        x: Tensor, sizes: Any, align_corners: bool, scale_factors: Sequence[float] | None = None
    ) -> Any:
        # That ONNX has. By a factor, torch.onnx forgets what the factor was; and where corners
        # are aligned, torch's pixels are elsewhere than ONNX's.
        if sizes is not None and not align_corners:
            return to_a_size(x, sizes, align_corners)
        return by_factors(x, sizes, align_corners, scale_factors)

    return resize


RESAMPLING: Table = {
    aten._upsample_bilinear2d_aa.vec: _antialiased(2, aten._upsample_bilinear2d_aa.default),
    aten._upsample_bicubic2d_aa.vec: _antialiased(4, aten._upsample_bicubic2d_aa.default),
    aten.grid_sampler.default: _grid_sampler,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
    aten.adaptive_max_pool2d_backward.default: _max_backward(2),
    aten.adaptive_max_pool3d_backward.default: _max_backward(3),
    aten.max_pool2d_with_indices_backward.default: _max_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_backward(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten.upsample_nearest1d_backward.default: _upsample_nearest_backward(1, False),
    aten.upsample_nearest2d_backward.default: _upsample_nearest_backward(2, False),
    aten.upsample_nearest3d_backward.default: _upsample_nearest_backward(3, False),
    aten._upsample_nearest_exact1d_backward.default: _upsample_nearest_backward(1, True),
    aten._upsample_nearest_exact2d_backward.default: _upsample_nearest_backward(2, True),
    aten._upsample_nearest_exact3d_backward.default: _upsample_nearest_backward(3, True),
}
