"""Mamba-1's layer, with the forks of Vim, VideoMamba, SegMamba, Vivim and Pan-Mamba; its block."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.causal_conv1d_update import causal_conv1d_update

from ..ops.selective_scan_interface import (
    bimamba_inner_fn,
    mamba_inner_fn,
    mamba_inner_fn_no_out_proj,
    selective_scan_fn,
)
from ..ops.triton.selective_state_update import selective_state_update
from . import block
from ._cache import states_of
from ._initial import kept, s4d_real, step_bias, wide

__all__ = ["Block", "Mamba"]


class Mamba(nn.Module):
    """A selective scan between two projections, with a causal convolution and a gate.

    d = expand·d_model channels, N states, R the rank of the step size.

    Args:
        d_model: width of input and output.
        d_state: N.
        d_conv: width of the convolution.
        expand: d / d_model.
        dt_rank: R; "auto" for ⌈d_model / 16⌉.
        dt_min: the least initial step size.
        dt_max: the greatest.
        dt_init: how dt_proj's weight begins, "random" or "constant".
        dt_scale: of it.
        dt_init_floor: of initial step sizes.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have one.
        use_fast_path: has no effect on results.
        layer_idx: the key of this layer's states when decoding.
        device: of the parameters.
        dtype: of the parameters, but for A_log and D, which are float32.
        bimamba_type: Vim's and later forks': "none" or None; "v1" scans backward too, with an A of
            its own; "v2" with parameters of its own throughout; "v3" also across slices of the
            sequence, or, where weights are Pan-Mamba's, another sequence and none backward.
        if_divide_out: Vim's: whether v2 takes the mean of both directions, not the sum.
        init_layer_scale: Vim's: the initial scale of the output, or None for no scale.
        nslices: SegMamba's: how many slices v3 goes across.
        nframes: Vivim's name of it; there v3 takes the mean of the three scans.
        if_devide_out: what older versions of Vim, and Audio Mamba, call if_divide_out.
        bimamba: VideoMamba's: whether bimamba_type is "v2".

    Raises:
        NotImplementedError: dt_init or bimamba_type is another.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        bimamba_type: str | None = "none",
        if_divide_out: bool = False,
        init_layer_scale: float | None = None,
        nslices: int = 5,
        nframes: int | None = None,
        bimamba: bool = False,
        if_devide_out: bool = False,
    ) -> None:
        super().__init__()
        bimamba_type = "v2" if bimamba else bimamba_type or "none"
        if bimamba_type not in ("none", "v1", "v2", "v3"):
            raise NotImplementedError(
                f"bimamba_type is {bimamba_type!r}; it must be none, v1, v2 or v3"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.d_inner = d = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx
        self.bimamba_type = bimamba_type
        self.if_divide_out = if_divide_out or if_devide_out
        self.nslices = nslices if nframes is None else nframes
        self._mean_of_three = nframes is not None
        self.init_layer_scale = init_layer_scale
        if init_layer_scale is not None:
            self.gamma = nn.Parameter(init_layer_scale * torch.ones(d_model))
        self.activation = "silu"
        self.act = nn.SiLU()

        def convolution() -> nn.Conv1d:
            return nn.Conv1d(d, d, d_conv, groups=d, padding=d_conv - 1, bias=conv_bias, **factory)

        self.in_proj = nn.Linear(d_model, 2 * d, bias=bias, **factory)
        self.conv1d = convolution()
        self.x_proj = nn.Linear(d, self.dt_rank + 2 * d_state, bias=False, **factory)
        self.dt_proj = nn.Linear(self.dt_rank, d, bias=True, **factory)
        spread = self.dt_rank**-0.5 * dt_scale
        if dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, spread)
        elif dt_init == "random":
            nn.init.uniform_(self.dt_proj.weight, -spread, spread)
        else:
            raise NotImplementedError(f"dt_init is {dt_init!r}; it must be random or constant")
        with torch.no_grad():
            self.dt_proj.bias.copy_(step_bias(d, dt_min, dt_max, dt_init_floor, factory))
        kept(self.dt_proj.bias, "_no_reinit")
        self.A_log = s4d_real(d, d_state, device)
        self.D = kept(nn.Parameter(torch.ones(d, device=device)), "_no_weight_decay")
        if bimamba_type == "v1":
            self.A_b_log = s4d_real(d, d_state, device)
        for way in {"v2": ("_b",), "v3": ("_b", "_s")}.get(bimamba_type, ()):
            x_proj = nn.Linear(d, self.dt_rank + 2 * d_state, bias=False, **factory)
            D = kept(nn.Parameter(torch.ones(d, device=device)), "_no_weight_decay")
            setattr(self, f"A{way}_log", s4d_real(d, d_state, device))
            setattr(self, f"conv1d{way}", convolution())
            setattr(self, f"x_proj{way}", x_proj)
            setattr(self, f"dt_proj{way}", nn.Linear(self.dt_rank, d, bias=True, **factory))
            setattr(self, f"D{way}", D)
        self.out_proj = nn.Linear(d, d_model, bias=bias, **factory)

    def fuseport_settle(self, names: Collection[str]) -> None:
        """Be Pan-Mamba's v3 where this layer's weights have none of a scan across slices."""
        if self.bimamba_type == "v3" and names and "A_s_log" not in names:
            self._take_another()

    def _take_another(self) -> None:
        for name in ("A_s_log", "D_s", "conv1d_s", "x_proj_s", "dt_proj_s"):
            delattr(self, name)
        weight, bias = self.in_proj.weight, self.in_proj.bias is not None
        factory: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.in_proj_extra = nn.Linear(self.d_model, 2 * self.d_inner, bias=bias, **factory)

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        extra_emb: Tensor | None = None,
    ) -> Tensor:
        """The layer over a sequence, or one step of decoding.

        Args:
            hidden_states: (b, l, d_model).
            inference_params: of decoding: keeps each layer's states, and how far it is. The
                fork's layers decode one way, as there.
            extra_emb: Pan-Mamba's: another sequence, of the same shape, which its v3 scans, too.

        Returns:
            (b, l, d_model).

        Raises:
            NotImplementedError: there is another sequence, and the weights are not of that fork.
        """
        crossed = hasattr(self, "in_proj_extra")
        if (extra_emb is not None) != crossed:
            raise NotImplementedError(
                "mamba_ssm: a layer takes extra_emb if it is of bimamba_type v3 and its weights "
                "are Pan-Mamba's, in_proj_extra among them"
            )
        if inference_params is not None:
            states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, *states)[0]
            out = self._with_states(hidden_states, *states)
        elif extra_emb is not None:
            ways = (self.in_proj, hidden_states, ""), (self.in_proj_extra, extra_emb, "_b")
            both = sum(self._one_way(project(x).mT, way).mT for project, x, way in ways)
            out = self.out_proj(both / 2 if self.if_divide_out else both)
        else:
            out = self._without_states(self.in_proj(hidden_states).mT)
        return out if self.init_layer_scale is None else out * self.gamma

    def _without_states(self, xz: Tensor) -> Tensor:
        inner = (self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight)
        out_proj = (self.out_proj.weight, self.out_proj.bias)
        A, D = -wide(self.A_log).exp(), wide(self.D)
        bias = wide(self.dt_proj.bias)
        if self.bimamba_type == "v1":
            A_b = -wide(self.A_b_log).exp()
            return bimamba_inner_fn(xz, *inner, *out_proj, A, A_b, D=D, delta_bias=bias)
        if self.bimamba_type == "none":
            return mamba_inner_fn(xz, *inner, *out_proj, A, D=D, delta_bias=bias)
        out = self._one_way(xz, "") + self._one_way(xz.flip(-1), "_b").flip(-1)
        mean_of = 2 if self.if_divide_out else 1
        if self.bimamba_type == "v3":
            # The steps of all slices at the first place, then of all at the second, and so on.
            slices = (self.nslices, xz.shape[-1] // self.nslices)
            across = xz.unflatten(-1, slices).mT.flatten(-2)
            out = out + self._one_way(across, "_s").unflatten(-1, slices[::-1]).mT.flatten(-2)
            mean_of = 3 if self._mean_of_three else 1
        return F.linear(out.mT / mean_of if mean_of > 1 else out.mT, *out_proj)

    def _one_way(self, xz: Tensor, way: str) -> Tensor:
        conv1d, x_proj, dt_proj, D = (
            getattr(self, name + way) for name in ("conv1d", "x_proj", "dt_proj", "D")
        )
        A_log = getattr(self, f"A{way}_log")
        return mamba_inner_fn_no_out_proj(
            xz,
            conv1d.weight,
            conv1d.bias,
            x_proj.weight,
            dt_proj.weight,
            -wide(A_log).exp(),
            D=wide(D),
            delta_bias=wide(dt_proj.bias),
        )

    def _with_states(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        x, z = self.in_proj(hidden_states).mT.chunk(2, 1)
        # The kept state has d_conv inputs, one more than the convolution reaches back.
        conv_state.copy_(F.pad(x, (self.d_conv - x.shape[-1], 0)))
        weight, bias = self.conv1d.weight.flatten(1), self.conv1d.bias
        x = causal_conv1d(x, weight, bias, activation=self.activation)
        dt, B, C = self._split(x.mT)
        y, last_state = selective_scan_fn(
            x,
            F.linear(dt, self.dt_proj.weight).mT,
            -wide(self.A_log).exp(),
            B.mT,
            C.mT,
            wide(self.D),
            z,
            wide(self.dt_proj.bias),
            True,
            True,
        )
        ssm_state.copy_(last_state)
        out: Tensor = self.out_proj(y.mT)
        return out

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token: (b, 1, d_model), with the states updated in place, and returned.

        Raises:
            ValueError: there is more than one token.
        """
        if hidden_states.shape[1] != 1:
            raise ValueError(f"one token at a time is decoded; got {hidden_states.shape[1]}")
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, -1)
        weight, bias = self.conv1d.weight.flatten(1), self.conv1d.bias
        x = causal_conv1d_update(x, conv_state, weight, bias, self.activation)
        dt, B, C = self._split(x)
        y = selective_state_update(
            ssm_state,
            x,
            F.linear(dt, self.dt_proj.weight),
            -wide(self.A_log).exp(),
            B,
            C,
            self.D,
            z,
            self.dt_proj.bias,
            True,
        )
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Zero states: (b, d, d_conv) of the convolution, (b, d, N) of the scan."""
        conv, step = self.conv1d.weight, self.dt_proj.weight
        return (
            conv.new_zeros((batch_size, self.d_inner, self.d_conv), dtype=dtype or conv.dtype),
            step.new_zeros((batch_size, self.d_inner, self.d_state), dtype=dtype or step.dtype),
        )

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, Tensor]:
        return states_of(self, inference_params, batch_size, initialize_states)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        widths = [self.dt_rank, self.d_state, self.d_state]
        parts: tuple[Tensor, ...] = self.x_proj(x).split(widths, -1)
        return parts


class Block(block.Block):
    """The block of mamba_ssm 1.x: `block.Block` without an MLP.

    Args:
        dim: width of the residual stream.
        mixer_cls: width → the layer.
        norm_cls: width → the norm.
        fused_add_norm: as there.
        residual_in_fp32: as there.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)
