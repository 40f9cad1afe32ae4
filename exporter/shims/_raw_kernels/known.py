"""Kernels that model code has CuPy compile, by their names: what they are expected to compute."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuseport.exporter.shims._raw_kernels import splatting, windows

__all__ = ["KNOWN", "Form", "Known"]

Form = Callable[..., Tensor]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Known:
    """What kernels of a name are expected to compute.

    Attributes:
        what: it is, for messages.
        name: of the kernel of the forward.
        shapes: of the tensors that a function is tried on, several times; by its arguments, which
            are dimensions where they are tensors.
        form: of the number of channels that the forward gives, the same in torch.
    """

    what: str
    name: re.Pattern[str]
    shapes: Callable[..., Sequence[Shapes]]
    form: Callable[[int], Form]


def _named(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"(kernel_)?({name})_(out|updateOutput|forward|forward_kernel)", re.IGNORECASE
    )


# Two samples; more channels than a warp has threads; more elements than a block has.
def _pairs(*_: Any) -> list[Shapes]:
    return [((2, 3, 4, 5),) * 2, ((1, 34, 2, 3),) * 2]


def _splats(*_: Any) -> list[Shapes]:
    return [((2, 3, 4, 5), (2, 2, 4, 5)), ((1, 2, 18, 16), (1, 2, 18, 16))]


def _filters(*_: Any) -> list[Shapes]:
    return [
        ((2, 3, 5, 6), (2, 3, 3, 4), (2, 3, 3, 4)),
        ((1, 3, 18, 16), (1, 2, 17, 15), (1, 2, 17, 15)),
    ]


def _resamples(x: Any, weight: Any, down: Any, right: Any, dilation: int = 1) -> list[Shapes]:
    return [
        ((b, 3, h + (side - 1) * dilation, w + (side - 1) * dilation), *((b, side**2, h, w),) * 3)
        for b, side, h, w in ((2, 2, 4, 5), (1, 3, 14, 13))
    ]


def _sizes(*options: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Images that windows fit into, and how many windows there are, in height and width.

    Args:
        options: kernel_size, stride, padding and dilation.
    """
    images = []
    for number in range(2):
        down, right = (
            max(dilation * (kernel - 1) + 1, pad + 2, 3) + axis + 4 * number
            for axis, (kernel, _, pad, dilation) in enumerate(
                zip(*map(windows.pair, options), strict=True)
            )
        )
        images.append((down, right))
    return images, [windows.counts(image, *options) for image in images]


def _involutions(x: Any, weight: Any, *options: Any) -> list[Shapes]:
    images, counts = _sizes((3, 2), *options)
    pairs = zip(images, counts, strict=True)
    return [((2, 6, *image), (2, 3, 3, 2, *count)) for image, count in pairs]


def _aggregations(x: int, weight: int, *options: Any) -> list[Shapes]:
    images, counts = _sizes(*options)
    kh, kw = windows.pair(options[0])
    return [
        (
            (2, 6, *image),
            (2, 2, kh * kw, oh * ow) if weight == 4 else (2, 3, 2, kh * kw, oh, ow),
        )
        for image, (oh, ow) in zip(images, counts, strict=True)
    ]


def _subtractions(x: Any, *options: Any) -> list[Shapes]:
    return [((2, 3, *image),) for image in _sizes(*options)[0]]


def _subtractions_of_two(x: Any, y: Any, *options: Any) -> list[Shapes]:
    return [((2, 3, *image),) * 2 for image in _sizes(*options)[0]]


def _differences(mode: str) -> Callable[[int], Form]:
    return lambda _: lambda x, *options: windows.subtracted(x, x, *options, mode=mode)


def _differences_of_two(mode: str) -> Callable[[int], Form]:
    return lambda _: lambda x, y, *options: windows.subtracted(x, y, *options, mode=mode)


def _sums(mode: str) -> Callable[[int], Form]:
    return lambda _: lambda x, weight, *options: windows.aggregated(x, weight, *options, mode=mode)


_OF_WINDOWS = (
    ("aggregation", "aggregation", _aggregations, _sums),
    ("subtraction", "subtraction", _subtractions, _differences),
    ("subtraction of two", "subtraction2", _subtractions_of_two, _differences_of_two),
)
"""With what is outside an image 0, or reflected."""

KNOWN = (
    Known(
        "the local correlation of PWC-Net",
        _named("correlation"),
        _pairs,
        lambda count: (
            lambda one, two, *stride: splatting.local_correlation(one, two, count, *stride)
        ),
    ),
    Known(
        "a cost volume of absolute differences",
        _named("costvol"),
        _pairs,
        lambda count: lambda one, two: splatting.absolute_differences(one, two, count),
    ),
    Known("summation splatting", _named("softsplat"), _splats, lambda count: splatting.splatted),
    Known(
        "adaptive separable convolution",
        _named("sepconv|separableconvolution"),
        _filters,
        lambda count: splatting.adaptive_sums,
    ),
    Known(
        "AdaCoF's adaptive collaboration of flows",
        _named("adacof"),
        _resamples,
        lambda count: windows.resampled,
    ),
    Known("involution", _named("involution"), _involutions, lambda count: windows.involved),
    *(
        Known(what, _named(f"{name}_{pad}"), shapes, form(mode))
        for what, name, shapes, form in _OF_WINDOWS
        for pad, mode in (("zeropad", "constant"), ("refpad", "reflect"))
    ),
)
