"""Mamba-2's layer without decoding, whose scan may begin from states that are learned."""

from typing import Any

import torch
from torch import Tensor, nn

from fuseport.ops.causal_conv1d import causal_conv1d

from ..ops.triton.ssd_combined import mamba_chunk_scan_combined
from ._initial import kept, wide
from .mamba2 import _NO_LIMIT, Mamba2

__all__ = ["Mamba2Simple"]


class Mamba2Simple(Mamba2):
    """`Mamba2` with other defaults, and no MLP beside the scan.

    Args:
        d_model: width of input and output.
        d_state: N.
        d_conv: width of the convolution.
        conv_init: bound of the convolution's initial weights; None for torch's own.
        expand: d / d_model.
        headdim: P.
        ngroups: G.
        A_init_range: of initial decays.
        dt_min: the least initial step size.
        dt_max: the greatest.
        dt_init_floor: of initial step sizes.
        dt_limit: what step sizes are clamped to.
        learnable_init_states: whether there is a parameter `init_states`, (H, P, N).
        activation: of the convolution: silu or swish.
        bias: whether the projections have one.
        conv_bias: whether the convolution has one.
        chunk_size: has no effect on results.
        use_mem_eff_path: whether the norm is of each group by itself; it is of all channels else.
        layer_idx: has no effect.

    Raises:
        ValueError: P does not divide the scan's channels.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        learnable_init_states: bool = False,
        activation: str = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            d_state,
            d_conv,
            conv_init,
            expand,
            headdim,
            ngroups=ngroups,
            A_init_range=A_init_range,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            dt_limit=dt_limit,
            bias=bias,
            conv_bias=conv_bias,
            chunk_size=chunk_size,
            use_mem_eff_path=use_mem_eff_path,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )
        self.activation = activation
        self.learnable_init_states = learnable_init_states
        if learnable_init_states:
            states = torch.zeros(self.nheads, headdim, d_state, device=device, dtype=dtype)
            self.init_states = kept(nn.Parameter(states), "_no_weight_decay")
        if not use_mem_eff_path:
            self.norm.group_size = None

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The layer over a sequence.

        Args:
            u: (b, l, d_model).
            seq_idx: (b, l), int32, the number of each step's packed sequence; or None. The first
                one begins from states that are learned.

        Returns:
            u's shape.
        """
        z0, x0, z, xbc, dt = self._split(self.in_proj(u))
        weight, bias = self.conv1d.weight.flatten(1), self.conv1d.bias
        xbc = causal_conv1d(xbc.mT, weight, bias, seq_idx, activation=self.activation).mT
        x, B, C = self._coefficients(xbc)
        y: Any = mamba_chunk_scan_combined(
            x,
            dt,
            -torch.exp(wide(self.A_log)),
            B,
            C,
            self.chunk_size,
            self.D,
            dt_bias=self.dt_bias,
            initial_states=self._first(len(u)),
            seq_idx=seq_idx,
            dt_softplus=True,
            dt_limit=self.dt_limit,
        )
        return self._ended(y.flatten(-2), z, z0, x0)

    def _first(self, batch: int) -> Tensor | None:
        if not self.learnable_init_states:
            return None
        return self.init_states.expand(batch, -1, -1, -1)
