"""Mamba-3's layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.compositions.mamba3 import (
    mamba3_mimo,
    mamba3_mimo_step,
    mamba3_siso,
    mamba3_siso_step,
)

from ..ops.triton.layernorm_gated import RMSNorm
from ._cache import kept_of
from ._initial import kept, step_bias, wide

__all__ = ["Mamba3", "heavy_tail_activation"]

_States = tuple[Tensor, Tensor, Tensor, Tensor]


def heavy_tail_activation(x: Tensor) -> Tensor:
    """1 + x from 0 up, and 1 / (1 - x) below."""
    return x.clamp_min(0) + torch.reciprocal(1 - x.clamp_max(0))


class Mamba3(nn.Module):
    """A scan by the trapezoidal rule with turning states, between two projections.

    d = expand·d_model channels, H heads of width P, G groups, N states, R ranks.

    Args:
        d_model: width of input and output.
        d_state: N.
        expand: d / d_model.
        headdim: P.
        ngroups: G.
        rope_fraction: of the N channels that are turned: 0.5 or 1.
        dt_min: the least initial step size.
        dt_max: the greatest.
        dt_init_floor: of initial step sizes.
        A_floor: the least rate of decay.
        is_outproj_norm: whether a gated RMS norm by heads follows the scan; else it is gated.
        is_mimo: whether there are R queries and keys at each step; one else.
        mimo_rank: R.
        fuse_pregate_headwise_norm: has no effect on results but for rounding.
        chunk_size: has no effect on results.
        dropout: has no effect.
        layer_idx: the key of this layer's states when decoding.
        n_layer: has no effect.
        kwargs: others have no effect.

    Raises:
        ValueError: P does not divide d, or the fraction is another one, or leaves nothing to turn.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.expand = expand
        self.headdim = headdim
        self.chunk_size = chunk_size
        self.layer_idx = layer_idx
        self.A_floor = A_floor
        self.is_outproj_norm = is_outproj_norm
        self.is_mimo = is_mimo
        self.mimo_rank = mimo_rank if is_mimo else 1
        self.fuse_pregate_headwise_norm = fuse_pregate_headwise_norm and is_mimo and is_outproj_norm
        self.d_inner = int(expand * d_model)
        if self.d_inner % headdim:
            raise ValueError(f"headdim {headdim} does not divide {self.d_inner} channels")
        self.nheads = self.d_inner // headdim
        self.num_bc_heads = ngroups
        if rope_fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction must be 0.5 or 1; got {rope_fraction}")
        self.rotary_dim_divisor = int(2 / rope_fraction)
        self.split_tensor_size = int(d_state * rope_fraction) // 2 * 2
        self.num_rope_angles = self.split_tensor_size // 2
        if self.num_rope_angles == 0:
            raise ValueError(f"d_state {d_state} has no pairs to turn")

        coefficients = ngroups * d_state * self.mimo_rank
        heads = [self.nheads] * 3
        self._parts = [self.d_inner] * 2 + [coefficients] * 2 + heads + [self.num_rope_angles]
        self.in_proj = nn.Linear(d_model, sum(self._parts), bias=False, **factory)
        single = {"device": device, "dtype": torch.float32}
        initial = step_bias(self.nheads, dt_min, dt_max, dt_init_floor, single)
        self.dt_bias = kept(nn.Parameter(initial), "_no_weight_decay")
        by_rank = (self.nheads, self.mimo_rank)
        self.B_bias = nn.Parameter(torch.ones(*by_rank, d_state, **single))
        self.C_bias = nn.Parameter(torch.ones(*by_rank, d_state, **single))
        self.B_norm = RMSNorm(d_state, 1e-5, **factory)
        self.C_norm = RMSNorm(d_state, 1e-5, **factory)
        if is_mimo:
            ones = torch.ones(*by_rank, headdim, device=device)
            self.mimo_x = nn.Parameter(ones / self.mimo_rank)
            self.mimo_z = nn.Parameter(ones.clone())
            self.mimo_o = nn.Parameter(ones / self.mimo_rank)
        self.D = kept(nn.Parameter(torch.ones(self.nheads, device=device)), "_no_weight_decay")
        if is_outproj_norm:
            self.norm = RMSNorm(self.d_inner, 1e-5, headdim, norm_before_gate=True, **factory)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False, **factory)

    def forward(
        self,
        u: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """The layer over a sequence, or one step of decoding.

        Args:
            u: (b, l, d_model).
            seq_idx: has no effect, as in the package itself.
            cu_seqlens: (S + 1,), where sequences that are packed in one row begin, and the last one
                ends; or None.
            inference_params: of decoding: keeps each layer's states, and how far it is.

        Returns:
            u's shape.
        """
        del seq_idx
        if inference_params is None:
            return self._scanned(u, cu_seqlens)[0]
        rows = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = self._get_states_from_cache(inference_params, rows)
        if inference_params.seqlen_offset > 0:
            # The package hands all of u to its step, which takes no sequences.
            one = u.squeeze(1) if u.dim() == 3 else u
            out = self.step(one, *states)[0]
            return out.unsqueeze(1) if u.dim() == 3 else out
        out, last = self._scanned(u, cu_seqlens, with_states=True)
        for state, new in zip(states, last, strict=True):
            state.copy_(new)
        return out

    def step(
        self,
        u: Tensor,
        angle_state: Tensor,
        ssm_state: Tensor,
        k_state: Tensor,
        v_state: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """One token: (b, d_model), with the states updated in place, and returned.

        Args:
            u: (b, d_model).
            angle_state: (b, H, angles).
            ssm_state: (b, H, P, N).
            k_state: (b, R, H, N).
            v_state: (b, H, P).
            kwargs: have no effect.
        """
        del kwargs
        states = (angle_state, ssm_state, k_state, v_state)
        out, last = self._stepped(u, states)
        for state, new in zip(states, last, strict=True):
            state.copy_(new)
        return (out, *states)

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        inplace_state: Any = None,
        **kwargs: Any,
    ) -> _States:
        """Zero states of a batch, as `step` takes them; the first two in float32 at least."""
        del max_seqlen, inplace_state, kwargs
        weight = self.in_proj.weight
        narrow: dict[str, Any] = {"device": device, "dtype": dtype or weight.dtype}
        single = {"device": device, "dtype": wide(weight).dtype}
        heads = (batch_size, self.nheads)
        return (
            weight.new_zeros(*heads, self.num_rope_angles, **single),
            weight.new_zeros(*heads, self.headdim, self.d_state, **single),
            weight.new_zeros(batch_size, self.mimo_rank, self.nheads, self.d_state, **narrow),
            weight.new_zeros(*heads, self.headdim, **narrow),
        )

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> _States:
        angle, ssm, k, v = kept_of(self, inference_params, batch_size, initialize_states)
        return angle, ssm, k, v

    def _projected(self, u: Tensor) -> tuple[dict[str, Any], Tensor]:
        """What both scans take, (b, l, …) or (b, …), and the gate."""
        z, x, B, C, steps, rates, trap, angles = self.in_proj(u).split(self._parts, -1)
        shape = (self.mimo_rank, self.num_bc_heads, self.d_state)
        B, C = self.B_norm(B.unflatten(-1, shape)), self.C_norm(C.unflatten(-1, shape))
        A = -heavy_tail_activation(wide(rates)).clamp(min=self.A_floor)
        delta = F.softplus(wide(steps) + wide(self.dt_bias))
        q_bias: Tensor = self.C_bias
        k_bias: Tensor = self.B_bias
        if not self.is_mimo:
            B, C, q_bias, k_bias = B.squeeze(-3), C.squeeze(-3), q_bias[:, 0], k_bias[:, 0]
        given = {
            "Q": C.to(x.dtype),
            "K": B.to(x.dtype),
            "V": x.unflatten(-1, (self.nheads, -1)),
            "ADT": (A * delta).movedim(-1, 1),
            "DT": delta.movedim(-1, 1),
            "Trap": trap.movedim(-1, 1),
            "Q_bias": q_bias,
            "K_bias": k_bias,
            "Angles": wide(angles).unsqueeze(-2),
            "D": self.D,
        }
        return given, z.unflatten(-1, (self.nheads, -1))

    def _rest(self, z: Tensor) -> dict[str, Any]:
        """What the scan takes beside: the gate, and what MIMO has of its own."""
        if not self.is_mimo:
            return {"Z": None if self.is_outproj_norm else z}
        norm = {}
        if self.is_outproj_norm:
            norm = {"outproj_norm_weight": self.norm.weight, "outproj_norm_eps": self.norm.eps}
        return {
            "Z": z,
            "MIMO_V": self.mimo_x,
            "MIMO_Z": self.mimo_z,
            "MIMO_Out": self.mimo_o,
            "rotary_dim_divisor": self.rotary_dim_divisor,
            "fuse_pregate_headwise_rms_norm": self.is_outproj_norm,
            **norm,
        }

    def _scanned(
        self, u: Tensor, cu_seqlens: Tensor | None, with_states: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        given, z = self._projected(u)
        given |= {**self._rest(z), "cu_seqlens": cu_seqlens}
        if self.is_mimo:
            y, *states = _listed(mamba3_mimo(**given, return_state=with_states))
        else:
            y, *states = _listed(mamba3_siso(**given, return_final_states=with_states))
            if with_states:
                states[2] = states[2].unsqueeze(1)
        return self._ended(y, z), tuple(states)

    def _stepped(self, u: Tensor, states: _States) -> tuple[Tensor, _States]:
        """One token, and the states after it, anew."""
        given, z = self._projected(u)
        given |= self._rest(z)
        if self.is_mimo:
            y, new = mamba3_mimo_step(**given, Input_States=states)
        else:
            angle, ssm, k, v = states
            y, (angle, ssm, k, v) = mamba3_siso_step(
                **given, Input_States=(angle, ssm, k.squeeze(1), v)
            )
            new = (angle, ssm, k.unsqueeze(1), v)
        return self._ended(y, z), new

    def _ended(self, y: Tensor, z: Tensor) -> Tensor:
        y = y.flatten(-2)
        if self.is_outproj_norm and not self.is_mimo:
            y = self.norm(y, z.flatten(-2))
        out: Tensor = self.out_proj(y.to(self.out_proj.weight.dtype))
        return out


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
