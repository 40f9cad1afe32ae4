"""The stand-in for depthwise convolutions, against their definition."""

import pytest
import torch
import torch.nn.functional as F

from fuseport.exporter import shims

with shims.installed(shims.SHIMS):
    from Dwconv.dwconv_layer import DepthwiseFunction, DwConv2d


@pytest.mark.parametrize("biased", [True, False])
def test_spatial_mambas_depthwise_convolution(biased: bool) -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((2, 3, 6, 7), (3, 1, 5, 3), (3,)))
    found = DepthwiseFunction.apply(x, w, b if biased else None, 2, 1, biased)
    padded = F.pad(x, (1, 1, 2, 2))
    expected = torch.zeros_like(x) + (b[:, None, None] if biased else 0)
    for i in range(5):
        for j in range(3):
            expected += padded[:, :, i : i + 6, j : j + 7] * w[:, 0, i, j, None, None]
    torch.testing.assert_close(found, expected)
    layer = DwConv2d(3, (5, 3), (2, 1), bias=biased).double()
    assert (layer.bias is None) != biased
    torch.testing.assert_close(
        layer(x), DepthwiseFunction.apply(x, layer.weight, layer.bias, 2, 1, biased)
    )
