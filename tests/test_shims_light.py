"""The stand-ins for fairseq's lightweight and dynamic convolutions, against their sums."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import dynamicconv_cuda
    import lightconv_cuda

EXTENSIONS = {"lightweight": lightconv_cuda, "dynamic": dynamicconv_cuda}


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def filters_of(name: str, heads: int, taps: int, steps: int) -> Tensor:
    return rand(heads, taps) if name == "lightweight" else rand(2, heads, taps, steps)


def by_definition(x: Tensor, filters: Tensor, before: int) -> Tensor:
    """Tap by tap and step by step."""
    channels, steps = x.shape[1:]
    every = filters if filters.dim() == 4 else filters[None, :, :, None].expand(2, -1, -1, steps)
    heads, taps = every.shape[1:3]
    rows = []
    for c in range(channels):
        f = every[:, c // (channels // heads)]
        for t in range(steps):
            inside = [(k, t + k - before) for k in range(taps) if 0 <= t + k - before < steps]
            rows.append(sum(f[:, k, t] * x[:, c, at] for k, at in inside))
    return torch.stack(rows, 1).unflatten(1, (channels, steps))


@pytest.mark.parametrize(("taps", "before"), [(3, 1), (3, 2), (7, 3), (15, 14)])
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("name", EXTENSIONS)
def test_values_and_gradients(name: str, steps: int, taps: int, before: int) -> None:
    x = rand(2, 6, steps).requires_grad_()
    filters = filters_of(name, 3, taps, steps).requires_grad_()
    expected = by_definition(x, filters, before)
    (out,) = EXTENSIONS[name].forward(x, filters, before)
    torch.testing.assert_close(out, expected)
    cotangent = rand(*out.shape)
    right = torch.autograd.grad(expected, [x, filters], cotangent)
    for found in (
        torch.autograd.grad(out, [x, filters], cotangent),
        EXTENSIONS[name].backward(cotangent, before, x, filters),
    ):
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_half_types_are_rounded_once(name: str) -> None:
    x, filters = rand(2, 4, 9).half(), filters_of(name, 2, 5, 9).half()
    (out,) = EXTENSIONS[name].forward(x, filters, 2)
    assert out.dtype == torch.float16
    expected = by_definition(x.double(), filters.double(), 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("taps", "before"), [(4, 2), (5, 3)])
@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_there_is_no_kernel_of_is_refused(name: str, taps: int, before: int) -> None:
    filters = filters_of(name, 2, taps, 9)
    said = rf"conv_cuda has no kernel of {taps} taps, {before} of them before a step"
    with pytest.raises(NotImplementedError, match=said):
        EXTENSIONS[name].forward(rand(2, 4, 9), filters, before)


CODE = """
import dynamicconv_cuda
import lightconv_cuda
import torch
from torch import nn


def function(extension):
    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weights, padding_l):
            ctx.padding_l = padding_l
            ctx.save_for_backward(x, weights)
            return extension.forward(x, weights, padding_l)[0]

        @staticmethod
        def backward(ctx, dout):
            found = extension.backward(dout.contiguous(), ctx.padding_l, *ctx.saved_tensors)
            return found[0], found[1], None

    return Convolution.apply


light, dynamic = function(lightconv_cuda), function(dynamicconv_cuda)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.taps = nn.Linear(2, 3, bias=False)
        self.of_steps = nn.Linear(6, 10)

    def forward(self, x):
        x = light(x.mT.contiguous(), self.taps.weight.mT.softmax(-1), 2)
        filters = self.of_steps(x.mT).unflatten(-1, (2, 5)).softmax(-1).permute(0, 2, 3, 1)
        return dynamic(x, filters.contiguous(), 4).mT
"""


def test_a_model_of_both_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {"taps": torch.nn.Linear(2, 3, bias=False), "of_steps": torch.nn.Linear(6, 10)}
    checkpoint, model = saved_with(CODE, **parts)
    _, report = verified(
        tmp_path / "b",
        (checkpoint, model),
        ["x:[batch,length,6]"],
        ["dynamicconv_cuda", "lightconv_cuda"],
    )
    rows = [row for row in report.results if row.verdict == "pass"]
    assert {"run", "own backward"} <= {row.way for row in rows}
