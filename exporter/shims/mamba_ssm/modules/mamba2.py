"""Mamba-2's layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.causal_conv1d_update import causal_conv1d_update

from ..ops.triton.layernorm_gated import RMSNorm
from ..ops.triton.selective_state_update import selective_state_update
from ..ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from ._cache import states_of
from ._initial import kept, step_bias, wide

__all__ = ["Mamba2"]

_NO_LIMIT = (0.0, float("inf"))


class Mamba2(nn.Module):
    """A scan with one decay for each head and step, between two projections.

    d = expand·d_model channels, H heads of width P, G groups, N states.

    Args:
        d_model: width of input and output.
        d_state: N.
        d_conv: width of the convolution.
        conv_init: bound of the convolution's initial weights; None for torch's own.
        expand: d / d_model.
        headdim: P.
        d_ssm: channels of the scan; None for all d. The others are a gated MLP.
        ngroups: G.
        A_init_range: of initial decays.
        D_has_hdim: whether D has an entry for each channel, not for each head.
        rmsnorm: whether a gated RMS norm follows the scan; else the scan itself is gated.
        norm_before_gate: of that norm.
        dt_min: the least initial step size.
        dt_max: the greatest.
        dt_init_floor: of initial step sizes.
        dt_limit: what step sizes are clamped to.
        bias: whether the projections have one.
        conv_bias: whether the convolution has one.
        chunk_size: has no effect on results.
        use_mem_eff_path: has no effect on results.
        layer_idx: the key of this layer's states when decoding.
        process_group: None; parallel layers are not supported.
        sequence_parallel: of parallel layers.

    Raises:
        NotImplementedError: there is a process_group.
        ValueError: P does not divide the scan's channels.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("fuseport's Mamba2 has no parallel layers (process_group)")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.d_inner = expand * d_model
        self.headdim = headdim
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.ngroups = ngroups
        if self.d_ssm % headdim:
            raise ValueError(f"headdim {headdim} does not divide {self.d_ssm} channels")
        self.nheads = self.d_ssm // headdim
        self.D_has_hdim = D_has_hdim
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_limit = dt_limit
        self.activation = "silu"
        self.act = nn.SiLU()
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx

        coefficients = ngroups * d_state
        projected = 2 * self.d_inner + 2 * coefficients + self.nheads
        convolved = self.d_ssm + 2 * coefficients
        self.in_proj = nn.Linear(d_model, projected, bias=bias, **factory)
        self.conv1d = nn.Conv1d(
            convolved,
            convolved,
            d_conv,
            groups=convolved,
            padding=d_conv - 1,
            bias=conv_bias,
            **factory,
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        initial = step_bias(self.nheads, dt_min, dt_max, dt_init_floor, factory)
        self.dt_bias = kept(nn.Parameter(initial), "_no_weight_decay")
        decay = torch.empty(self.nheads, dtype=torch.float32, device=device)
        decay = decay.uniform_(*A_init_range).log().to(dtype or torch.float32)
        self.A_log = kept(nn.Parameter(decay), "_no_weight_decay")
        skips = torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device)
        self.D = kept(nn.Parameter(skips), "_no_weight_decay")
        if rmsnorm:
            self.norm = RMSNorm(
                self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **factory
            )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """The layer over a sequence, or one step of decoding.

        Args:
            u: (b, l, d_model), or (b·l, d_model) where seqlen is given.
            seqlen: l, or None.
            seq_idx: (b, l), int32, the number of each step's packed sequence; or None.
            cu_seqlens: where packed sequences begin, and the end, of their states: None where
                inference_params is given; else without effect.
            inference_params: of decoding: keeps each layer's states, and how far it is.

        Returns:
            u's shape.

        Raises:
            NotImplementedError: sequences are packed while decoding.
        """
        if inference_params is not None and not (seq_idx is None and cu_seqlens is None):
            raise NotImplementedError("fuseport's Mamba2 decodes no packed sequences")
        steps = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        if inference_params is None:
            out = self._without_states(self.in_proj(steps), seq_idx)
        else:
            states = self._get_states_from_cache(inference_params, steps.shape[0])
            if inference_params.seqlen_offset > 0:
                return self.step(steps, *states)[0]
            out = self._with_states(self.in_proj(steps), *states)
        return out if seqlen is None else out.flatten(0, 1)

    def _without_states(self, zxbcdt: Tensor, seq_idx: Tensor | None) -> Tensor:
        out: Tensor = mamba_split_conv1d_scan_combined(
            zxbcdt,
            self.conv1d.weight.flatten(1),
            self.conv1d.bias,
            self.dt_bias,
            -torch.exp(wide(self.A_log)),
            self._skip(),
            self.chunk_size,
            seq_idx=seq_idx,
            dt_limit=self.dt_limit,
            activation=self.activation,
            rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
            rmsnorm_eps=self.norm.eps if self.rmsnorm else 1e-6,
            outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias,
            headdim=None if self.D_has_hdim else self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=self.norm_before_gate,
        )
        return out

    def _with_states(self, zxbcdt: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        z0, x0, z, xbc, dt = self._split(zxbcdt)
        # The kept state has d_conv inputs, one more than the convolution reaches back.
        conv_state.copy_(F.pad(xbc.mT, (self.d_conv - xbc.shape[1], 0)))
        weight, bias = self.conv1d.weight.flatten(1), self.conv1d.bias
        xbc = causal_conv1d(xbc.mT, weight, bias, activation=self.activation).mT
        x, B, C = self._coefficients(xbc)
        y, last_state = mamba_chunk_scan_combined(
            x,
            dt,
            -torch.exp(wide(self.A_log)),
            B,
            C,
            self.chunk_size,
            self._skip(),
            None if self.rmsnorm else z.unflatten(-1, (self.nheads, self.headdim)),
            self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            return_final_states=True,
        )
        ssm_state.copy_(last_state)
        return self._ended(y.flatten(-2), z, z0, x0)

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token: (b, 1, d_model), with the states updated in place, and returned.

        Raises:
            ValueError: there is more than one token.
        """
        if hidden_states.shape[1] != 1:
            raise ValueError(f"one token at a time is decoded; got {hidden_states.shape[1]}")
        z0, x0, z, xbc, dt = self._split(self.in_proj(hidden_states.squeeze(1)))
        weight, bias = self.conv1d.weight.flatten(1), self.conv1d.bias
        xbc = causal_conv1d_update(xbc, conv_state, weight, bias, self.activation)
        x, B, C = self._coefficients(xbc)
        shape = (self.nheads, self.headdim)
        skip = self._skip()
        y = selective_state_update(
            ssm_state,
            x,
            dt[..., None].expand(-1, *shape),
            (-torch.exp(wide(self.A_log)))[:, None, None].expand(*shape, self.d_state),
            B,
            C,
            skip if self.D_has_hdim else skip[:, None].expand(shape),
            None if self.rmsnorm else z.unflatten(-1, shape),
            self.dt_bias[:, None].expand(shape),
            True,
        )
        out = self._ended(y.flatten(-2), z, z0, x0)
        return out.unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Zero states: (b, d + 2GN, d_conv) of the convolution, (b, H, P, N) of the scan."""
        conv, last = self.conv1d.weight, self.in_proj.weight
        by_time = (batch_size, self.d_conv, conv.shape[0])
        by_head = (batch_size, self.nheads, self.headdim, self.d_state)
        return (
            conv.new_zeros(by_time, dtype=dtype or conv.dtype).transpose(1, 2),
            last.new_zeros(by_head, dtype=dtype or last.dtype),
        )

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, Tensor]:
        return states_of(self, inference_params, batch_size, initialize_states)

    def _skip(self) -> Tensor:
        return self.D.unflatten(0, (-1, self.headdim)) if self.D_has_hdim else self.D

    def _split(self, zxbcdt: Tensor) -> tuple[Tensor, ...]:
        beside = self.d_inner - self.d_ssm
        convolved = self.conv1d.weight.shape[0]
        widths = [beside, beside, self.d_ssm, convolved, self.nheads]
        parts: tuple[Tensor, ...] = zxbcdt.split(widths, -1)
        return parts

    def _coefficients(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coefficients = self.ngroups * self.d_state
        x, B, C = xbc.split([self.d_ssm, coefficients, coefficients], -1)
        groups = (self.ngroups, self.d_state)
        return (
            x.unflatten(-1, (self.nheads, self.headdim)),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
        )

    def _ended(self, y: Tensor, z: Tensor, z0: Tensor, x0: Tensor) -> Tensor:
        if self.rmsnorm:
            y = self.norm(y, z)
        if z0.shape[-1]:
            y = torch.cat([F.silu(z0) * x0, y], -1)
        out: Tensor = self.out_proj(y)
        return out
