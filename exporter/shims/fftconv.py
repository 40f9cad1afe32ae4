"""Stands in for `fftconv`, the long convolution of HazyResearch's H3, Hyena and long convolutions.

D. Y. Fu et al., "Hungry Hungry Hippos: Towards Language Modeling with State Space Models", 2023.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["fftconv_bwd", "fftconv_fwd"]


def fftconv_fwd(
    u: Tensor,
    filter: Tensor,
    D: Tensor,
    v: Tensor | None,
    head_dim: int,
    q: Tensor | None,
    dropout_mask: Tensor | None,
    gelu: bool,
    gelu_inp: bool,
    gelu_q: bool,
    fft_size: int,
    force_fp16_output: bool,
    output_hbl_layout: bool,
    fftfp16: bool,
) -> Tensor:
    """Σ_i q_i · act(conv(x_ij, k) + D · x_ij) · mask, x_ij = u_i · v_j; without q and v, x is u.

    i and j go over the rows of a head, which has a k and a D. The convolution is causal, over all
    steps, and computed in float32 at least, as all is.

    Args:
        u, v, q: (b, h, l) in one dtype, in the order of heads.
        filter: the Fourier transform of k's rows, (h / head_dim, fft_size / 2 + 1), complex.
        D: (h / head_dim,).
        dropout_mask: (b, h), factors; heads of several rows have none.
        gelu: whether act is gelu, by the error function.
        gelu_inp, gelu_q: False.
        fft_size: 2·l at least.
        force_fp16_output: whether the result is float16, but for bfloat16.
        output_hbl_layout: whether the batch is the second dimension in memory.
        fftfp16: tunes the CUDA kernel only.

    Returns:
        (b, h, l) in u's dtype.

    Raises:
        NotImplementedError: gelu_inp or gelu_q, or a mask of heads of several rows.
    """
    _refuse(gelu_inp, gelu_q, dropout_mask, head_dim)
    out = _convolved(u, filter, D, v, q, head_dim, dropout_mask, gelu, fft_size)
    half = force_fp16_output and u.dtype != torch.bfloat16
    out = out.to(torch.float16 if half else u.dtype)
    if output_hbl_layout:
        return out.transpose(0, 1).contiguous().transpose(0, 1)
    return out.contiguous()


def fftconv_bwd(
    dout: Tensor,
    u: Tensor,
    filter: Tensor,
    D: Tensor,
    v: Tensor | None,
    head_dim: int,
    q: Tensor | None,
    dropout_mask: Tensor | None,
    gelu: bool,
    gelu_inp: bool,
    gelu_q: bool,
    fft_size: int,
    output_hbl_layout: bool,
    fftfp16: bool,
) -> tuple[Any, ...]:
    """`(du, dfilter, dD, dv, dq)`, the last two None where there is none.

    Of dfilter the inverse transform, not divided by its size, is the gradient of k. dv is float32
    at least. Raises as `fftconv_fwd`.
    """
    _refuse(gelu_inp, gelu_q, dropout_mask, head_dim)

    def function(u: Tensor, filter: Tensor, D: Tensor, v: Tensor, q: Tensor) -> Tensor:
        return _convolved(u, filter, D, v, q, head_dim, dropout_mask, gelu, fft_size)

    du, dfilter, dD, dv, dq = differentiated(function, [u, filter, D, v, q], dout)
    # Of a frequency and its negative, which only one stands for, the gradient is that of both.
    edges = torch.arange(filter.shape[-1], device=filter.device) % (fft_size // 2) == 0
    dfilter = torch.where(edges, dfilter, dfilter / 2)
    return du, dfilter, dD, None if dv is None else dv.to(wide(dv)), dq


def _convolved(
    u: Tensor,
    filter: Tensor,
    D: Tensor,
    v: Tensor | None,
    q: Tensor | None,
    head_dim: int,
    mask: Tensor | None,
    gelu: bool,
    fft_size: int,
) -> Tensor:
    real = torch.promote_types(wide(u, D), filter.dtype.to_real())
    x = u.to(real).unflatten(1, (-1, head_dim)).unsqueeze(3)  # (b, heads, i, j, l)
    if v is not None:
        x = x * v.to(real).unflatten(1, (-1, head_dim)).unsqueeze(2)
    spectrum = torch.fft.rfft(x, n=fft_size) * filter[:, None, None]
    y: Tensor = torch.fft.irfft(spectrum, n=fft_size)[..., : u.shape[-1]]
    y = y + x * D.to(real)[:, None, None, None]
    if gelu:
        y = F.gelu(y)
    if mask is not None:
        y = y * mask.to(real)[:, :, None, None, None]
    if q is None:
        return y.flatten(1, 3)
    weighted: Tensor = y * q.to(real).unflatten(1, (-1, head_dim)).unsqueeze(3)
    return weighted.sum(2).flatten(1, 2)


def _refuse(gelu_inp: bool, gelu_q: bool, mask: Tensor | None, head_dim: int) -> None:
    if gelu_inp or gelu_q:
        raise NotImplementedError("fftconv has no gelu of its inputs: leave it to the code")
    if mask is not None and head_dim > 1:
        raise NotImplementedError(
            f"fuseport's stand-in for fftconv has no dropout_mask of heads of {head_dim} rows"
        )
