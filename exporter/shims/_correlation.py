"""The correlations of the extensions of optical flow and stereo, over the registered op."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fuseport.ops.correlation import correlation

__all__ = ["flownet", "mean_windows", "sampler", "write"]


def sampler(
    input1: Tensor,
    input2: Tensor,
    kH: int,  # names of the extensions, by which mmcv calls
    kW: int,
    patchH: int,
    patchW: int,
    padH: int,
    padW: int,
    dilationH: int,
    dilationW: int,
    dilation_patchH: int,
    dilation_patchW: int,
    dH: int,
    dW: int,
) -> Tensor:
    """`fuseport.ops.correlation`, as `spatial_correlation_sampler_backend` and mmcv name and order
    its arguments: (b, c, h, w) twice to (b, patchH, patchW, h', w')."""
    return correlation(
        input1,
        input2,
        kernel_size=(kH, kW),
        patch_size=(patchH, patchW),
        stride=(dH, dW),
        padding=(padH, padW),
        dilation=(dilationH, dilationW),
        dilation_patch=(dilation_patchH, dilation_patchW),
    )


def flownet(
    input1: Tensor,
    input2: Tensor,
    pad_size: int,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
) -> Tensor:
    """FlowNet's correlation as `correlation_cuda` computes it: (b, displacements, h', w').

    The mean over channels and kernel of the products at displacements of all multiples of
    `stride2` up to `max_displacement`, rows first, at every `stride1`-th place of the inputs
    within a frame of `pad_size` zeros (Dosovitskiy et al. 2015, section 3).

    Raises:
        ValueError: a size or stride is less than 1.
        NotImplementedError: the kernel would reach over the frame, where the extension reads
            what is beside it in memory.
    """
    # The kernel is centred; an even one has the extent of the odd one below it, and the mean its
    # own number of elements.
    radius = (kernel_size - 1) // 2
    if stride2 > 0 and radius > max_displacement % stride2:
        raise NotImplementedError(
            f"kernel_size {kernel_size} with max_displacement {max_displacement} and stride2 "
            f"{stride2}: correlation_cuda reads outside of its padded inputs then"
        )
    found = mean_windows(
        input1,
        input2,
        (pad_size, pad_size),
        (max_displacement - radius,) * 2,
        2 * radius + 1,
        (max_displacement, max_displacement),
        stride1,
        stride2,
    )
    return found * ((2 * radius + 1) / kernel_size) ** 2 if kernel_size % 2 == 0 else found


def mean_windows(
    input1: Tensor,
    input2: Tensor,
    pad: tuple[int, int],
    first: tuple[int, int],
    extent: int,
    reach: tuple[int, int],
    stride: int,
    spacing: int,
) -> Tensor:
    """The mean over channels and windows of products: (b, displacements, h', w').

    Args:
        input1: (b, c, h, w).
        input2: the same, displaced against it.
        pad: zeros above and below, left and right.
        first: where the first window begins in the padded input.
        extent: of a window, in height and width.
        reach: the largest displacement; displacements are the multiples of `spacing`.
        stride: of windows. There are as many as leave `reach` and half an extent free behind
            them, too.
        spacing: of displacements.

    Raises:
        ValueError: an extent or stride is less than 1.
    """
    if min(extent, stride, spacing) < 1:
        raise ValueError(
            f"kernels and strides have to be 1 or more: {extent}, {stride} and {spacing}"
        )
    dtype = input1.dtype
    if dtype in (torch.float16, torch.bfloat16):  # the sum is beyond what halves hold
        input1, input2 = input1.float(), input2.float()
    sizes = [
        -((2 * (free + (extent - 1) // 2) - size - 2 * zeros) // stride)
        for size, zeros, free in zip(input1.shape[2:], pad, reach, strict=True)
    ]
    patch = tuple(2 * (most // spacing) + 1 for most in reach)
    found = correlation(
        input1,
        input2,
        extent,
        (patch[0], patch[1]),
        stride,
        (pad[0] - first[0], pad[1] - first[1]),
        1,
        spacing,
    )
    if extent > 1:
        found = found[..., : sizes[0], : sizes[1]]
    return (found.flatten(1, 2) / (input1.shape[1] * extent * extent)).to(dtype)


def write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes the values where the extension does, which gives its outputs their size."""
    for target, value in zip(targets, values, strict=True):
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            # In a capture, where torch resizes to numbers only; a gradient is made of its graph.
            torch.ops.aten.set_.source_Tensor(target, value)
            continue
        if target.shape != value.shape:
            target.resize_(value.shape)
        target.copy_(value)
