"""Deformable convolution: the definition, plain convolution, ONNX's own DeformConv."""

import itertools
import math
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.deform_conv2d import deform_conv2d
from fuseport.ops.deform_conv2d.cases import CASES

CASE = {case.name: case for case in CASES}
NAMES = ("modulated", "plain", "groups_across_offset_groups", "stride", "dilation", "even_filter")


def called(name: str, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the public function for a case."""
    given = CASE[name].make(dtype, 2)
    tensors = [given[key] for key in ("input", "offset", "weight", "bias")]
    pairs = ("stride", "padding", "dilation")
    options = {key: (given[f"{key}_h"], given[f"{key}_w"]) for key in pairs}
    return tensors, {**options, "mask": given.get("mask")}


def scalar(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    mask: Tensor | None,
) -> Tensor:
    """The definition, one output channel and tap at a time."""
    b, c, height, width = x.shape
    o, per_group, kh, kw = weight.shape
    taps = kh * kw
    G = offset.shape[1] // (2 * taps)
    out = torch.zeros(b, o, *offset.shape[2:], dtype=torch.float64)
    for i, to, y, column in itertools.product(*map(range, out.shape)):
        total = float(bias[to])
        for k, tap in itertools.product(range(per_group), range(taps)):
            channel = to // (o // (c // per_group)) * per_group + k
            part = channel // (c // G) * taps + tap
            dy, dx = offset[i, 2 * part : 2 * part + 2, y, column].tolist()
            at_y = y * stride[0] - padding[0] + tap // kw * dilation[0] + dy
            at_x = column * stride[1] - padding[1] + tap % kw * dilation[1] + dx
            top, left = math.floor(at_y), math.floor(at_x)
            sample = 0.0
            for p, q in itertools.product((top, top + 1), (left, left + 1)):
                if 0 <= p < height and 0 <= q < width:
                    share = (1 - abs(at_y - p)) * (1 - abs(at_x - q))
                    sample += share * float(x[i, channel, p, q])
            factor = 1.0 if mask is None else float(mask[i, part, y, column])
            total += float(weight[to, k, tap // kw, tap % kw]) * sample * factor
        out[i, to, y, column] = total
    return out


@pytest.mark.parametrize("name", ["groups_across_offset_groups", "stride", "one_tap"])
def test_the_definition(name: str) -> None:
    tensors, options = called(name, torch.float64)
    torch.testing.assert_close(deform_conv2d(*tensors, **options), scalar(*tensors, **options))


@pytest.mark.parametrize("name", ["plain", "groups", "stride", "dilation", "even_filter"])
def test_without_offsets_it_is_a_convolution(name: str) -> None:
    (x, offset, weight, bias), options = called(name, torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    zeros = torch.zeros_like(offset)
    options["mask"] = None
    mine = deform_conv2d(x, zeros, weight, bias, **options)
    plain = F.conv2d(
        x,
        weight,
        bias,
        options["stride"],
        options["padding"],
        options["dilation"],
        x.shape[1] // weight.shape[1],
    )
    torch.testing.assert_close(mine, plain)
    cotangent = torch.randn_like(plain)
    for got, wanted in zip(
        torch.autograd.grad(mine, leaves, cotangent),
        torch.autograd.grad(plain, leaves, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_options_of_one_number_and_no_bias() -> None:
    (x, offset, weight, bias), options = called("modulated", torch.float64)
    mask = options["mask"]
    expected = deform_conv2d(x, offset, weight, torch.zeros_like(bias), **options)
    assert torch.equal(deform_conv2d(x, offset, weight, None, 1, 1, 1, mask), expected)
    ones = deform_conv2d(x, offset, weight, bias, 1, 1, 1, torch.ones_like(mask))
    torch.testing.assert_close(deform_conv2d(x, offset, weight, bias, 1, 1), ones)


def test_what_is_outside_or_no_number_is_zero() -> None:
    (x, offset, weight, bias), options = called("one_tap", torch.float64)
    offset[:, :, 0, 0] = math.nan
    offset[:, :, 0, 1] = math.inf
    x[:, :, 0, 0] = math.nan  # a pixel that none of these may be mistaken for
    out = deform_conv2d(x, offset, weight, bias, **options)
    assert torch.equal(out[:, :, 0, :2], bias[:, None].expand(2, -1, 2))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no stride": ({"stride": 0}, "stride_h must be 1 or more; got 0"),
    "less than no padding": ({"padding": (1, -1)}, "padding_w must be 0 or more; got -1"),
    "no output": ({"dilation": 9}, "input must be so large that there is an output"),
    "another size": ({"stride": 2}, r"offset must be \(b, 2\*G\*kh\*kw, oh, ow\) = "),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options_are_refused(what: str) -> None:
    tensors, options = called("modulated", torch.float32)
    changed, message = BAD[what]
    with pytest.raises(ValueError, match=f"fuseport::deform_conv2d_modulated: {message}"):
        deform_conv2d(*tensors, **{**options, **changed})


@pytest.mark.parametrize("name", NAMES)
def test_onnxs_own_operator_computes_the_same(name: str) -> None:
    """DeformConv has our layouts: dy before dx, tap by tap, group by group."""
    (x, offset, weight, bias), options = called(name, torch.float32)
    mask = options["mask"]
    feed = {"x": x, "w": weight, "offset": offset, "bias": bias}
    if mask is not None:
        feed["mask"] = mask
    node = onnx.helper.make_node(
        "DeformConv",
        list(feed),
        ["y"],
        strides=options["stride"],
        pads=options["padding"] * 2,
        dilations=options["dilation"],
        kernel_shape=weight.shape[2:],
        group=x.shape[1] // weight.shape[1],
        offset_group=offset.shape[1] // (2 * weight.shape[2] * weight.shape[3]),
    )
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info(k, 1, list(v.shape)) for k, v in feed.items()],
        [onnx.helper.make_tensor_value_info("y", 1, [None] * 4)],
    )
    opsets = [onnx.helper.make_opsetid("", 19)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (theirs,) = session.run(None, {k: np.ascontiguousarray(v) for k, v in feed.items()})
    mine = deform_conv2d(x, offset, weight, bias, **options)
    torch.testing.assert_close(mine, torch.from_numpy(theirs), atol=2e-5, rtol=2e-5)
