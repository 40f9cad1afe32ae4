"""Correlation: the local cost volume of optical flow and stereo networks.

Source: Dosovitskiy et al., "FlowNet: learning optical flow with convolutional networks", 2015,
equation 1, of filters in place of square patches. Signature and semantics follow
`spatial_correlation_sample` of spatial_correlation_sampler, and mmcv's `Correlation`.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.correlation import reference, shapes
from fuseport.ops.correlation.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "correlation"]


def correlation(
    input1: Tensor,
    input2: Tensor,
    kernel_size: int | tuple[int, int] = 1,
    patch_size: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    dilation_patch: int | tuple[int, int] = 1,
) -> Tensor:
    """Products of each place of an image with the places around it in another one.

    With b batch, c channels, (kh, kw) the kernel and (ph, pw) the patch, of rows and columns alike:

        out[b, i, j, y, x] = Σ_{c, u, v} input1[b, c, Y, X] · input2[b, c, Y + dy, X + dx]
        Y = y·stride - padding + u·dilation        dy = (i - ⌊(ph - 1)/2⌋)·dilation_patch

    where both are inside; a pair with a pixel outside is left out. Nothing is normalised: networks
    that want a mean divide by c·kh·kw. A patch of an even size reaches one step further to the
    right and down; with an even `dilation_patch` besides, the two libraries' CUDA forward begins
    elsewhere than their backward, and than this op. mmcv's `max_displacement` d is a patch of
    2·d + 1. FlowNet's layer with `pad_size`, `max_displacement`, `stride1` and `stride2` is a
    padding of pad_size - max_displacement, a patch of 2·(max_displacement // stride2) + 1 and a
    `dilation_patch` of stride2, over c·kernel_size², its displacements flattened.

    Args:
        input1: (b, c, H, W), float16, bfloat16, float32 or float64.
        input2: (b, c, H, W), input1's dtype.
        kernel_size: of the windows that are compared; as the others, of height and width or both.
        patch_size: how many displacements there are.
        stride: from one output to the next, in pixels.
        padding: how far outside of the image the first window begins; negative, inside.
        dilation: from one pixel of a window to the next.
        dilation_patch: from one displacement to the next, in pixels.

    Returns:
        (b, ph, pw, oh, ow), contiguous, in input1's dtype, with
        oh = ⌊(H + 2·padding - dilation·(kh - 1) - 1)/stride⌋ + 1; sums are of float32 at least.
        Differentiable, once.

    Raises:
        ValueError: a shape, dtype, device or option does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    pairs = (kernel_size, patch_size, stride, padding, dilation, dilation_patch)
    options = [value for pair in pairs for value in _pair(pair)]
    out: Tensor = torch.ops.fuseport.correlation(input1, input2, *options)
    return out


def _pair(option: int | tuple[int, int]) -> tuple[int, int]:
    rows, columns = (option, option) if isinstance(option, int) else option
    return rows, columns


_OPTIONS = ", ".join(f"int {name}" for name in shapes.Options._fields)

SPEC = OpSpec(
    name="correlation",
    package=__name__,
    function=correlation,
    operators=(
        Operator(
            name="correlation",
            schema=f"(Tensor input1, Tensor input2, {_OPTIONS}) -> Tensor out",
            reference=reference.correlation,
            fake=shapes.fake,
            backward="correlation_backward",
        ),
        Operator(
            name="correlation_backward",
            schema=f"(Tensor dout, Tensor input1, Tensor input2, {_OPTIONS}) "
            "-> (Tensor dinput1, Tensor dinput2)",
            reference=reference.correlation_backward,
            fake=shapes.fake_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs={
        "body: wrong constant: *: Constant to one_float*": "what is not zero is inside of an image",
        "body: another operator: correlation: Sub to after_*": "a wider margin is cut off again",
    },
    stands_for=(
        "spatial_correlation",
        "SpatialCorrelation",
        "FunctionCorrelation",
        "CorrelationFunction",
        "correlation_cuda",
        "correlation_forward",
    ),
    bench=BENCH,
    lacks={"ONNX native": "no such operator"},
)
