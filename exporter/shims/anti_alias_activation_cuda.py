"""Stands in for `anti_alias_activation_cuda`, the extension that BigVGAN compiles.

S. Lee et al., "BigVGAN: A Universal Neural Vocoder with Large-Scale Training", 2023, section 3.2.
"""

import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide

__all__ = ["forward"]

_TAPS = 12
_BESIDE = 5  # what the second filter reads beside the first and the last sample
_LEAST = 1e-9  # is added to beta


def forward(
    input: Tensor, up_filter: Tensor, down_filter: Tensor, alpha: Tensor, beta: Tensor
) -> Tensor:
    """x + sin²(a·x)/b at twice the rate, and back, computed in float32 at least.

    Before the first and after the last sample x goes on as that; of what the kernel computes there
    its second filter reads, where BigVGAN's own layers have the first and the last result again.
    So the kernel gives other values than these at the three samples of either end.

    Args:
        input: x, (b, c, t), of a floating dtype.
        up_filter: 12 taps, at twice the rate; any shape, as below.
        down_filter: 12 taps.
        alpha: (c,), the logarithm of a.
        beta: (c,), that of b.

    Returns:
        Of the shape and dtype of x.

    Raises:
        ValueError: a filter has another number of taps.
    """
    for name, taps in (("up_filter", up_filter), ("down_filter", down_filter)):
        if taps.numel() != _TAPS:
            raise ValueError(f"anti_alias_activation_cuda: {name} has {taps.numel()} taps, not 12")
    real = wide(input)
    channels = input.shape[1]
    up, down = (
        taps.to(real).reshape(1, 1, _TAPS).expand(channels, 1, _TAPS)
        for taps in (up_filter, down_filter)
    )
    x = F.pad(input.to(real), (_BESIDE, _BESIDE), mode="replicate")
    # The kernel's sum is a correlation: that of a transposed convolution is the other way round.
    x = 2 * F.conv_transpose1d(x, up.flip(-1), stride=2, groups=channels)
    x = x[..., 2 * _BESIDE : -2 * _BESIDE]
    frequency, magnitude = (p.to(real).exp().reshape(-1, 1) for p in (alpha, beta))
    x = x + (x * frequency).sin().square() / (magnitude + _LEAST)
    return F.conv1d(x, down, stride=2, groups=channels).to(input.dtype)
