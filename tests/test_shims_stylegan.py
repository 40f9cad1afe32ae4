"""The stand-ins for BasicSR's extensions of StyleGAN2, against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from fuseport.exporter import shims

with shims.installed(shims.SHIMS):
    import fused_act_ext
    import upfirdn2d_ext


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (2, 1, 1, 3), (-1, 2, 0, -2)])
@pytest.mark.parametrize("down", [(1, 1), (2, 3)])
@pytest.mark.parametrize("up", [(1, 1), (2, 3)])
def test_images_are_resampled(
    up: tuple[int, int], down: tuple[int, int], pads: tuple[int, int, int, int]
) -> None:
    x = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    kernel = torch.randn(3, 4, dtype=torch.float64)
    spread = torch.zeros(2, 6 * up[1], 7 * up[0], 3, dtype=torch.float64)
    spread[:, :: up[1], :: up[0]] = x
    left, right, above, below = pads
    ends = (slice(max(-above, 0), spread.shape[1] - max(-below, 0)),)
    ends += (slice(max(-left, 0), spread.shape[2] - max(-right, 0)),)
    padded = F.pad(spread[:, *ends], [0, 0] + [max(p, 0) for p in pads])
    high, wide = padded.shape[1] - 2, padded.shape[2] - 3
    whole = torch.zeros(2, high, wide, 3, dtype=torch.float64)
    for i in range(3):
        for j in range(4):  # a convolution: the kernel is back to front
            whole += kernel[2 - i, 3 - j] * padded[:, i : i + high, j : j + wide]
    found = upfirdn2d_ext.upfirdn2d(x, kernel, *up, *down, *pads)
    torch.testing.assert_close(found, whole[:, :: down[1], :: down[0]])


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("act", [1, 3])
def test_bias_and_activation(act: int, biased: bool) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    nothing = x.new_empty(0)
    bias = torch.randn(3, dtype=torch.float64) if biased else nothing
    found = fused_act_ext.fused_bias_act(x, bias, nothing, act, 0, 0.2, 2**0.5)
    inner = x + bias[:, None, None] if biased else x
    expected = (F.leaky_relu(inner, 0.2) if act == 3 else inner) * 2**0.5
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(x)
    (grad,) = torch.autograd.grad(expected, x, cotangent)
    back = fused_act_ext.fused_bias_act(cotangent, nothing, expected, act, 1, 0.2, 2**0.5)
    torch.testing.assert_close(back, grad)
    twice = fused_act_ext.fused_bias_act(cotangent, nothing, expected, act, 2, 0.2, 2**0.5)
    assert torch.equal(twice, torch.zeros_like(x))


def test_another_activation_is_refused() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(NotImplementedError, match="act 2: there are 1, linear, and 3, lrelu"):
        fused_act_ext.fused_bias_act(x, x[0], x[:0], 2, 0, 0.2, 1.0)
