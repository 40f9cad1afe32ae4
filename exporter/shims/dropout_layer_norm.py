"""Stands in for `dropout_layer_norm`, flash-attention's extension for norms of sums.

It is what its `flash_attn.ops.layer_norm` and `rms_norm` call, and copies of these, as TinyLlama's
and Samba's `FusedRMSNorm`. Formulas: csrc/layer_norm of Dao-AILab/flash-attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.ops.rms_norm import rms_norm

__all__ = [
    "dropout_add_ln_bwd",
    "dropout_add_ln_fwd",
    "dropout_add_ln_parallel_residual_bwd",
    "dropout_add_ln_parallel_residual_fwd",
]

_Optional = Tensor | None


def dropout_add_ln_fwd(
    x0: Tensor,
    residual: _Optional,
    gamma: Tensor,
    beta_: _Optional,
    rowscale_: _Optional,
    colscale_: _Optional,
    x0_subset_: _Optional,
    z_subset_: _Optional,
    dropout_p: float,
    epsilon: float,
    rowscale_const: float,
    z_numrows: int,
    gen_: Any,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> list[_Optional]:
    """`[z, x, dmask, mu, rsigma]`: the norm of x = dropout(x0 · rowscale) · colscale + residual.

    Args:
        x0: (n, d).
        residual: like x0, or None; its dtype is x's.
        gamma: (d,).
        beta_: (d,), or None.
        rowscale_: (n,), or None.
        colscale_: (d,), or None.
        x0_subset_: must be None.
        z_subset_: must be None.
        dropout_p: above 0 it is always done.
        epsilon: under the root.
        rowscale_const: of subsets.
        z_numrows: of subsets.
        gen_: has no effect.
        residual_in_fp32: x is float32 where there is no residual to tell its dtype.
        is_rms_norm: without the mean.

    Returns:
        z in x0's dtype; x, or None where it is x0; what was kept, (n, d) of uint8, or None without
        dropout; the means and reciprocal deviations, (n,), float32 or wider.

    Raises:
        NotImplementedError: rows are left out.
    """
    _refuse_subsets(x0_subset_, z_subset_)
    dmask = _kept(x0, dropout_p)
    total = _scaled(x0, dmask, dropout_p, rowscale_, colscale_)
    scaled = rowscale_ is not None or colscale_ is not None
    x = _sum_of((total,), residual, x0, residual_in_fp32, scaled or dropout_p > 0)
    total = total if residual is None else total + residual
    mean, reciprocal = _statistics(total, epsilon, is_rms_norm)
    z = _normal(total, gamma, beta_, epsilon, is_rms_norm)
    return [z.to(x0.dtype), x, dmask, mean, reciprocal]


def dropout_add_ln_bwd(
    dz: Tensor,
    dx_: _Optional,
    x: Tensor,
    x0_: _Optional,
    dmask_: _Optional,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    rowscale_: _Optional,
    colscale_: _Optional,
    x0_subset_: _Optional,
    z_subset_: _Optional,
    dropout_p: float,
    rowscale_const: float,
    x0_numrows: int,
    has_residual: bool,
    is_rms_norm: bool = False,
) -> list[_Optional]:
    """`[dx0, dresidual, dgamma, dbeta, dgamma_part, dbeta_part]`, then of colscale two such.

    `dx_` is the cotangent of x, or None; what is called a part, the sum over some of the rows, is
    that over all of them, (1, d). `x0_` is wanted where there is a colscale.

    Raises:
        NotImplementedError: rows are left out.
    """
    _refuse_subsets(x0_subset_, z_subset_)
    dtotal, (sums,) = _backward((dz,), (gamma,), dx_, x, mu, rsigma, is_rms_norm)
    dx0 = _scaled(dtotal, dmask_, dropout_p, rowscale_, colscale_).to(dz.dtype)
    parts = [part.unsqueeze(0) for part in sums]
    dresidual = dtotal.to(x.dtype) if has_residual else None
    result: list[_Optional] = [dx0, dresidual, *(s.to(gamma.dtype) for s in sums), *parts]
    if colscale_ is not None:
        assert x0_ is not None  # as the extension asserts
        of_columns = (_scaled(dtotal, dmask_, dropout_p, rowscale_, None) * x0_).sum(0)
        result += [of_columns.to(colscale_.dtype), of_columns.unsqueeze(0)]
    return result


def dropout_add_ln_parallel_residual_fwd(
    x0: Tensor,
    x1_: _Optional,
    residual: _Optional,
    gamma0: Tensor,
    beta0_: _Optional,
    gamma1_: _Optional,
    beta1_: _Optional,
    dropout_p: float,
    epsilon: float,
    gen_: Any,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> list[_Optional]:
    """`[z0, z1, x, dmask0, dmask1, mu, rsigma]`: two norms of dropout(x0) + dropout(x1) + residual.

    z1 is None without a gamma1_, dmask1 without an x1_; else as `dropout_add_ln_fwd`.
    """
    given = [x0] if x1_ is None else [x0, x1_]
    masks = [_kept(each, dropout_p) for each in given]
    terms = [_scaled(x, m, dropout_p, None, None) for x, m in zip(given, masks, strict=True)]
    x = _sum_of(terms, residual, x0, residual_in_fp32, x1_ is not None or dropout_p > 0)
    total = sum(terms[1:], terms[0])
    total = total if residual is None else total + residual
    mean, reciprocal = _statistics(total, epsilon, is_rms_norm)
    z0 = _normal(total, gamma0, beta0_, epsilon, is_rms_norm).to(x0.dtype)
    z1 = None
    if gamma1_ is not None:
        z1 = _normal(total, gamma1_, beta1_, epsilon, is_rms_norm).to(x0.dtype)
    return [z0, z1, x, masks[0], masks[1] if x1_ is not None else None, mean, reciprocal]


def dropout_add_ln_parallel_residual_bwd(
    dz0: Tensor,
    dz1_: _Optional,
    dx_: _Optional,
    x: Tensor,
    dmask0_: _Optional,
    dmask1_: _Optional,
    mu: Tensor,
    rsigma: Tensor,
    gamma0: Tensor,
    gamma1_: _Optional,
    dropout_p: float,
    has_x1: bool,
    has_residual: bool,
    is_rms_norm: bool = False,
) -> list[_Optional]:
    """`[dx0, dx1, dresidual, dgamma0, dbeta0, dgamma1, dbeta1]`, then parts of the last four."""
    cotangents = (dz0,) if dz1_ is None else (dz0, dz1_)
    weights = (gamma0,) if gamma1_ is None else (gamma0, gamma1_)
    dtotal, found = _backward(cotangents, weights, dx_, x, mu, rsigma, is_rms_norm)
    dx0 = _scaled(dtotal, dmask0_, dropout_p, None, None).to(dz0.dtype)
    dx1 = _scaled(dtotal, dmask1_, dropout_p, None, None).to(dz0.dtype) if has_x1 else None
    sums: list[_Optional] = [each for pair in found for each in pair]
    sums += [None] * (4 - len(sums))
    rounded = [None if s is None else s.to(gamma0.dtype) for s in sums]
    parts = [None if s is None else s.unsqueeze(0) for s in sums]
    return [dx0, dx1, dtotal.to(x.dtype) if has_residual else None, *rounded, *parts]


def _refuse_subsets(*subsets: _Optional) -> None:
    if any(subset is not None for subset in subsets):
        raise NotImplementedError(
            "dropout_layer_norm was called with a subset of rows on fuseport's stand-in, which "
            "leaves out none"
        )


def _kept(x: Tensor, dropout_p: float) -> _Optional:
    """What dropout keeps, of uint8; None where it keeps all."""
    if dropout_p == 0:
        return None
    return (torch.rand_like(x, dtype=torch.float32) >= dropout_p).to(torch.uint8)


def _scaled(
    x: Tensor,
    dmask: _Optional,
    dropout_p: float,
    rowscale: _Optional,
    colscale: _Optional,
) -> Tensor:
    """x, and by the same factors what its gradient is of that of the sum, float32 or wider."""
    value = x.to(wide(x))
    if rowscale is not None:
        value = value * rowscale[:, None]
    if dmask is not None and dropout_p > 0:
        value = value * dmask / (1 - dropout_p)
    return value if colscale is None else value * colscale


def _sum_of(
    terms: Sequence[Tensor],
    residual: _Optional,
    x0: Tensor,
    residual_in_fp32: bool,
    differs: bool,
) -> _Optional:
    """The sum as it is kept; None where it is x0, which `differs` says of the terms."""
    alone = wide(x0) if residual_in_fp32 else x0.dtype
    dtype = alone if residual is None else residual.dtype
    if residual is None and not differs and dtype == x0.dtype:
        return None
    total = sum(terms[1:], terms[0])
    return (total if residual is None else total + residual).to(dtype)


def _statistics(x: Tensor, epsilon: float, is_rms_norm: bool) -> tuple[Tensor, Tensor]:
    """The means of rows, and what they are divided by: √(variance + ε), or √(mean square + ε)."""
    variance, mean = torch.var_mean(x, 1, correction=0)
    under = x.square().mean(1) if is_rms_norm else variance
    return mean, torch.rsqrt(under + epsilon)


def _normal(x: Tensor, gamma: Tensor, beta: _Optional, epsilon: float, is_rms_norm: bool) -> Tensor:
    weight = gamma.to(x.dtype)
    bias = None if beta is None else beta.to(x.dtype)
    if not is_rms_norm:
        return F.layer_norm(x, x.shape[1:], weight, bias, epsilon)
    normal = rms_norm(x, weight, epsilon)
    return normal if bias is None else normal + bias


def _backward(
    cotangents: Sequence[Tensor],
    weights: Sequence[Tensor],
    dx: _Optional,
    x: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    is_rms_norm: bool,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The gradient of the sum, and those of each weight and bias, in float32 or wider."""
    real = mean.dtype
    value = x.to(real)
    value = (value if is_rms_norm else value - mean[:, None]) * reciprocal[:, None]
    each = [dz.to(real) for dz in cotangents]
    dvalue = sum(dz * w.to(real) for dz, w in zip(each, weights, strict=True))
    assert isinstance(dvalue, Tensor)  # there is one at least
    along = (dvalue * value).mean(1, keepdim=True) * value
    if not is_rms_norm:
        along = along + dvalue.mean(1, keepdim=True)
    dtotal = (dvalue - along) * reciprocal[:, None]
    dtotal = dtotal if dx is None else dtotal + dx
    return dtotal, [((dz * value).sum(0), dz.sum(0)) for dz in each]
