"""Sums over the states of S4 and S4D, with the states' conjugates, of which n stand for 2·n.

A. Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", 2022; "On the
Parameterization and Initialization of Diagonal State Space Models", 2022.
"""

import torch
from torch import Tensor

from fuseport.exporter.shims._gradients import differentiated

__all__ = [
    "cauchy_mult_sym_bwd",
    "cauchy_mult_sym_fwd",
    "vand_log_mult_sym_bwd",
    "vand_log_mult_sym_fwd",
]


def cauchy_mult_sym_fwd(v: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Σ_n v_n / (z_l - w_n) + conj(v_n) / (z_l - conj(w_n)).

    Args:
        v, w: (b, n), complex.
        z: (l,), complex.

    Returns:
        (b, l), complex.
    """
    at = z[:, None]
    v, w = v.unsqueeze(1), w.unsqueeze(1)
    return (v / (at - w) + v.conj() / (at - w.conj())).sum(-1)


def cauchy_mult_sym_bwd(v: Tensor, z: Tensor, w: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """`(dv, dw)`, as torch has gradients of complex numbers."""
    dv, dw = differentiated(lambda v, w: cauchy_mult_sym_fwd(v, z, w), [v, w], dout)
    return dv, dw


def vand_log_mult_sym_fwd(v: Tensor, x: Tensor, L: int) -> Tensor:
    """2 · Re(Σ_n v_n · exp(x_n · l)) for l < L.

    Args:
        v, x: (b, n), complex.

    Returns:
        (b, L), real.
    """
    at = torch.arange(L, device=x.device).to(x.dtype)
    powers = torch.exp(x.unsqueeze(-1) * at)
    found: Tensor = 2 * (v.unsqueeze(1) @ powers).squeeze(1).real
    return found


def vand_log_mult_sym_bwd(v: Tensor, x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """`(dv, dx)`, as torch has gradients of complex numbers."""
    steps = dout.shape[1]
    dv, dx = differentiated(lambda v, x: vand_log_mult_sym_fwd(v, x, steps), [v, x], dout)
    return dv, dx
