"""Deformable convolution: a filter whose taps move by offsets of their own at each output.

Signature and semantics follow `torchvision.ops.deform_conv2d` (Dai et al., "Deformable
convolutional networks", 2017; with a mask Zhu et al., "Deformable ConvNets v2: More deformable,
better results", 2019, equation 1), so that models that call it work unchanged.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.deform_conv2d import reference, shapes
from fuseport.ops.deform_conv2d.cases import BENCH, BUGS, CASES
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "deform_conv2d"]


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Convolve bilinear samples; b batch, c channels, o output channels, (kh, kw) the filter.

    Tap (i, j) of output (y, x) is at row y·stride - padding + i·dilation + dy, and column likewise,
    times its mask. A sample takes zeros for pixels outside. The number of groups g is c over
    weight's second size, that of offset groups G is offset's second size over 2·kh·kw; channel k
    has the offsets of group k // (c/G). The gradient of an offset jumps where a sample is at the
    centre of a row or column of pixels; there it is that of the pixels beyond. Sums are of float32
    at least; on CUDA, samples of half types are rounded to these before they are multiplied.

    Args:
        input: (b, c, H, W), float16, bfloat16, float32 or float64.
        offset: (b, 2·G·kh·kw, oh, ow), input's dtype: dy and dx in turn, for each tap, in pixels.
        weight: (o, c/g, kh, kw), input's dtype.
        bias: (o,), input's dtype, or None.
        stride: of outputs, for rows and columns or both.
        padding: by how much the first tap begins outside.
        dilation: between taps.
        mask: (b, G·kh·kw, oh, ow), input's dtype, or None.

    Returns:
        (b, o, oh, ow), contiguous, with oh = ⌊(H + 2·padding - dilation·(kh - 1) - 1)/stride⌋ + 1;
        differentiable, once, in all tensors that are given.

    Raises:
        ValueError: a shape, dtype, device or option does not fit, or an image has 2^31 pixels or
            more; the message names the argument.
    """
    registration.ensure(SPEC)
    if bias is None:
        bias = weight.new_zeros(weight.shape[:1])
    options = (*_pair(stride), *_pair(padding), *_pair(dilation))
    operators = torch.ops.fuseport
    if mask is None:
        out: Tensor = operators.deform_conv2d(input, offset, weight, bias, *options)
    else:
        out = operators.deform_conv2d_modulated(input, offset, mask, weight, bias, *options)
    return out


def _of_torchvision(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Tensor:
    """The operator under `torchvision.ops.deform_conv2d`; shapes tell the groups, too."""
    return deform_conv2d(
        input,
        offset,
        weight,
        bias,
        (stride_h, stride_w),
        (pad_h, pad_w),
        (dilation_h, dilation_w),
        mask if use_mask else None,
    )


def _pair(option: int | tuple[int, int]) -> tuple[int, int]:
    rows, columns = (option, option) if isinstance(option, int) else option
    return rows, columns


_OPTIONS = (
    "int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w"
)

SPEC = OpSpec(
    name="deform_conv2d",
    package=__name__,
    function=deform_conv2d,
    operators=(
        Operator(
            name="deform_conv2d",
            schema=f"(Tensor input, Tensor offset, Tensor weight, Tensor bias, {_OPTIONS}) "
            "-> Tensor out",
            reference=reference.deform_conv2d,
            fake=shapes.fake_plain,
            backward="deform_conv2d_backward",
        ),
        Operator(
            name="deform_conv2d_modulated",
            schema="(Tensor input, Tensor offset, Tensor mask, Tensor weight, Tensor bias, "
            f"{_OPTIONS}) -> Tensor out",
            reference=reference.deform_conv2d_modulated,
            fake=shapes.fake_modulated,
            backward="deform_conv2d_modulated_backward",
        ),
        Operator(
            name="deform_conv2d_backward",
            schema="(Tensor dout, Tensor input, Tensor offset, Tensor weight, Tensor bias, "
            f"{_OPTIONS}) -> (Tensor dinput, Tensor doffset, Tensor dweight, Tensor dbias)",
            reference=reference.deform_conv2d_backward,
            fake=shapes.fake_plain_backward,
        ),
        Operator(
            name="deform_conv2d_modulated_backward",
            schema="(Tensor dout, Tensor input, Tensor offset, Tensor mask, Tensor weight, "
            f"Tensor bias, {_OPTIONS}) -> (Tensor dinput, Tensor doffset, Tensor dmask, "
            "Tensor dweight, Tensor dbias)",
            reference=reference.deform_conv2d_modulated_backward,
            fake=shapes.fake_modulated_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs={
        f"{kind}: *_backward: bias": "the backward takes the bias for its shape alone"
        for kind in ("gradient's term", "saved in half", "cotangent not contiguous")
    },
    stands_for=(
        "deform_conv",
        "DeformConv",
        "DCNv",
        "_ext.dcn",
    ),
    replaces={"torchvision::deform_conv2d": _of_torchvision},
    bench=BENCH,
    evidence=(
        Evidence(
            "a convolution that computes the offsets of another",
            {"*offset*.weight": (None, None, None, None)},
        ),
    ),
)
