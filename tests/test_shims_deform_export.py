"""Models with deformable convolution as others write it, exported and verified."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.report import OWN_BACKWARD

Saved = Callable[..., tuple[Path, str]]

# As in BasicSR, EDVR and mmdetection: an extension in a package of theirs, an autograd function
# that refuses the CPU, buffers to write into, a step that divides the batch. In DB, a constructor
# imports it.
THEIRS = """
import torch

try:
    from . import deform_conv_ext
except ImportError:
    pass


class Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offset, mask, weight):
        if not x.is_cuda:
            raise NotImplementedError
        ctx.save_for_backward(x, offset, mask, weight)
        step = min(64, x.shape[0])
        assert x.shape[0] % step == 0
        out = x.new_empty(x.shape[0], weight.shape[0], (x.shape[2] - 1) // 2 + 1, x.shape[3])
        ctx.buffers = bias, ones, columns = [x.new_empty(0) for _ in range(3)]
        deform_conv_ext.modulated_deform_conv_forward(
            x, weight, bias, ones, offset, mask, out, columns,
            3, 3, 2, 1, 1, 1, 1, 1, 1, 2, False,
        )
        return out

    @staticmethod
    def backward(ctx, dout):
        if not dout.is_cuda:
            raise NotImplementedError
        given = x, offset, mask, weight = ctx.saved_tensors
        dx, doffset, dmask, dweight = [torch.zeros_like(t) for t in given]
        bias, ones, columns = ctx.buffers
        deform_conv_ext.modulated_deform_conv_backward(
            x, weight, bias, ones, offset, mask, columns,
            dx, dweight, bias, doffset, dmask, dout.contiguous(),
            3, 3, 2, 1, 1, 1, 1, 1, 1, 2, False,
        )
        return dx, doffset, dmask, dweight


convolved = Convolved.apply
"""
OF_THEIRS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        from their_package.dcn import convolved
        self.convolved = convolved
        self.filter = nn.Conv2d(4, 3, 3, bias=False)
        self.offset = nn.Conv2d(4, 54, 3, (2, 1), 1)

    def forward(self, x):
        y, x_, mask = self.offset(x).chunk(3, 1)
        return self.convolved(x, torch.cat([y, x_], 1), mask.sigmoid(), self.filter.weight)
"""


def test_an_autograd_function_over_an_extension(tmp_path: Path, saved_with: Saved) -> None:
    torch.manual_seed(0)
    weights = {"filter": nn.Conv2d(4, 3, 3, bias=False), "offset": nn.Conv2d(4, 54, 3)}
    checkpoint, model = saved_with(OF_THEIRS, **weights)
    (checkpoint.parent / "their_package").mkdir()
    (checkpoint.parent / "their_package" / "__init__.py").touch()
    (checkpoint.parent / "their_package" / "dcn.py").write_text(THEIRS)
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=parse_inputs(["x:[batch,4,6,5]"]),
        format="exported_program",
    ).folder
    manifest = open_bundle(bundle).manifest
    assert manifest["architecture"]["config"]["shims"] == ["deform_conv_ext"]
    assert set(manifest["ops"]) == {
        "fuseport::deform_conv2d_modulated",
        "fuseport::deform_conv2d_modulated_backward",
    }
    report = api.verify(bundle, model=model, runtime="eager")
    assert report.exit_code() == 0, report.failures()
    assert {row.way for row in report.results} == {"run", OWN_BACKWARD}


# The operator of torchvision, if that is not here: its name and schema, over plain torch.
OPERATOR = """
import torch
import torch.nn.functional as F

SCHEMA = (
    "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor"
)


def plain(x, weight, offset, mask, bias, sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask):
    taps, (oh, ow) = weight.shape[2] * weight.shape[3], offset.shape[2:]
    columns = []
    for k in range(x.shape[1]):
        for tap in range(taps):
            place = k * offset_groups // x.shape[1] * taps + tap
            i, j = divmod(tap, weight.shape[3])
            y0 = torch.arange(oh)[:, None] * sh - ph + i * dh
            y, x0 = y0 + offset[:, 2 * place], torch.arange(ow) * sw - pw + j * dw
            at = [(x0 + offset[:, 2 * place + 1] + 0.5) / x.shape[3], (y + 0.5) / x.shape[2]]
            grid = torch.stack(at, -1) * 2 - 1
            sample = F.grid_sample(x[:, k : k + 1], grid, align_corners=False)
            columns.append(sample * mask[:, place, None] if use_mask else sample)
    samples = torch.cat(columns, 1).unflatten(1, (groups, -1))
    filters = weight.flatten(1).unflatten(0, (groups, -1))
    return torch.einsum("bgkyx,gok->bgoyx", samples, filters).flatten(1, 2) + bias[:, None, None]


if not hasattr(torch.ops.torchvision, "deform_conv2d"):
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("deform_conv2d" + SCHEMA)

    @torch.library.impl("torchvision::deform_conv2d", "cpu", lib=LIBRARY)
    def forward(*inputs):
        return plain(*inputs)

    @torch.library.register_fake("torchvision::deform_conv2d", lib=LIBRARY)
    def fake(x, weight, offset, *others):
        return x.new_empty(x.shape[0], weight.shape[0], *offset.shape[2:])

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    def gradient(ctx, dout):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = plain(*leaves, *ctx.options)
            found = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
        return *found, *[None] * len(ctx.options)

    torch.library.register_autograd(
        "torchvision::deform_conv2d", gradient, setup_context=keep, lib=LIBRARY
    )


def deform_conv2d(x, offset, weight, bias=None, stride=1, padding=0, dilation=1, mask=None):
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    options = (stride, stride, padding, padding, dilation, dilation)
    groups = x.shape[1] // weight.shape[1]
    taps = weight.shape[2] * weight.shape[3]
    given = x.new_zeros(x.shape[0], 1) if mask is None else mask
    return torch.ops.torchvision.deform_conv2d(
        x, weight, offset, given, bias, *options, groups, offset.shape[1] // (2 * taps),
        mask is not None,
    )
"""
OF_TORCHVISION = """
from torch import nn
from {module} import deform_conv2d


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 3, bias=False)
        self.offset, self.mask = nn.Conv2d(4, 36, 3, 2, 1), nn.Conv2d(4, 9, 3, 2, 1)

    def forward(self, x):
        offset, mask = self.offset(x), self.mask(x).sigmoid()
        x = deform_conv2d(x, offset, self.first.weight, self.first.bias, 2, 1)
        weight, bias = self.second.weight, self.second.bias
        return deform_conv2d(x, offset[:, :18], weight, bias, 1, 1, mask=mask)
"""
TORCHVISION = importlib.util.find_spec("torchvision") is not None


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(
            "torchvision.ops",
            marks=pytest.mark.skipif(not TORCHVISION, reason="torchvision is not installed"),
        ),
        pytest.param(
            "their_operator",
            marks=pytest.mark.skipif(TORCHVISION, reason="torchvision has the operator"),
        ),
    ],
)
def test_torchvisions_operator_is_the_op_in_every_program(
    module: str, tmp_path: Path, saved_with: Saved
) -> None:
    torch.manual_seed(0)
    weights = {
        "first": nn.Conv2d(4, 6, 3, groups=2),
        "second": nn.Conv2d(6, 2, 3, bias=False),
        "offset": nn.Conv2d(4, 36, 3),
        "mask": nn.Conv2d(4, 9, 3),
    }
    checkpoint, model = saved_with(OF_TORCHVISION.format(module=module), **weights)
    (checkpoint.parent / "their_operator.py").write_text(OPERATOR)
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        inputs=parse_inputs(["x:[batch,4,height,6]"]),
        format="onnx",
    ).folder
    manifest = open_bundle(bundle).manifest
    assert set(manifest["ops"]) == {
        f"fuseport::deform_conv2d{kind}{way}"
        for kind in ("", "_modulated")
        for way in ("", "_backward")
    }
    # The truth, which is the model itself in float64, is of its operator.
    report = api.verify(bundle, model=model, runtime="onnxruntime")
    assert report.exit_code() == 0, report.failures()
