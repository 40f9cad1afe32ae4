"""Convolutions of a few filters, each for a group of channels, as fairseq's extensions have them.

F. Wu et al., "Pay Less Attention with Lightweight and Dynamic Convolutions", 2019. With K taps and
p of them before a step: y_t = Σ_k f_k · x_{t+k-p}, zero outside. Of C channels and H filters,
channel c has filter c // (C/H).
"""

import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide

__all__ = ["dynamic", "lightweight"]

_TAPS = (3, 5, 7, 15, 31, 63, 127, 255)
"""Those that there are kernels of."""


def lightweight(x: Tensor, filters: Tensor, padding_l: int) -> Tensor:
    """The same filters at all steps, computed in float32 at least.

    Args:
        x: (b, C, t).
        filters: (H, K), H a divisor of C.
        padding_l: p, K // 2 or K - 1.

    Returns:
        Of the shape and dtype of x.

    Raises:
        NotImplementedError: there is no kernel of so many taps, or of that padding, where the
            extension prints that, and gives zeros.
    """
    heads, taps = filters.shape
    _refuse_others("lightconv_cuda", taps, padding_l)
    real = wide(x, filters)
    channels = x.shape[1]
    every = filters.to(real).repeat_interleave(channels // heads, 0).unsqueeze(1)
    padded = F.pad(x.to(real), (padding_l, taps - 1 - padding_l))
    return F.conv1d(padded, every, groups=channels).to(x.dtype)


def dynamic(x: Tensor, filters: Tensor, padding_l: int) -> Tensor:
    """Filters of each step, (b, H, K, t); the rest is as of `lightweight`."""
    heads, taps = filters.shape[1:3]
    _refuse_others("dynamicconv_cuda", taps, padding_l)
    real = wide(x, filters)
    padded = F.pad(x.to(real), (padding_l, taps - 1 - padding_l))
    windows = padded.unflatten(1, (heads, -1)).unfold(-1, taps, 1)  # (b, H, C/H, t, K)
    of_steps = filters.to(real).mT.unsqueeze(-1)  # (b, H, t, K, 1)
    out: Tensor = (windows.transpose(2, 3) @ of_steps).squeeze(-1).mT
    return out.flatten(1, 2).to(x.dtype)


def _refuse_others(extension: str, taps: int, padding: int) -> None:
    if taps not in _TAPS or padding not in (taps // 2, taps - 1):
        known = ", ".join(map(str, _TAPS))
        raise NotImplementedError(
            f"{extension} has no kernel of {taps} taps, {padding} of them before a step, and gives "
            f"zeros: there are {known} taps, half of them before, or all but one"
        )
