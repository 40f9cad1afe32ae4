"""Mamba-1 language models: embedding, blocks of a selective scan, a head.

Architecture and parameter names are those of github.com/state-spaces/mamba (Gu & Dao, 2023); the
code is our own. b batch, l length, D = d_inner channels, N = d_state, W = d_conv, R = dt_rank.
The scan gets transposed views of activations that are (b, l, channels) in memory.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing
from fuseport.exporter.models import _recognition as recognition
from fuseport.exporter.models._decoding import advanced, filtered
from fuseport.exporter.models._language_model import (
    LanguageModel,
    LanguageModelConfig,
    built,
    cast,
    parsed,
    wide,
)
from fuseport.exporter.models.model import Model
from fuseport.ops.selective_scan import selective_scan

__all__ = ["SIGNS", "MambaConfig", "MambaLM", "model", "recognise"]

SIGNS = (
    "*backbone.embedding*.weight",
    "*backbone.layers.*.mixer.A_log",
    "*backbone.layers.*.mixer.conv1d.weight",
    "*backbone.layers.*.mixer.x_proj.weight",
    "*backbone.layers.*.mixer.dt_proj.weight",
)


@dataclass(frozen=True, kw_only=True)
class MambaConfig(LanguageModelConfig):
    """What Mamba-1 language models differ in, beside what all language models do.

    Attributes:
        d_state: N, states per channel.
        d_conv: W, the causal filter's width.
        d_inner: D, channels of the scan.
        dt_rank: R, the step size's inner width.
    """

    d_state: int
    d_conv: int
    d_inner: int
    dt_rank: int


class MambaLM(LanguageModel):
    """A Mamba-1 language model with state-spaces' parameter names and initial values."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__(config, lambda: _Mixer(config))


class _Mixer(nn.Module):
    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        D, N, R = config.d_inner, config.d_state, config.dt_rank
        self.in_proj = nn.Linear(config.d_model, 2 * D, bias=config.proj_bias)
        self.conv1d = nn.Conv1d(D, D, config.d_conv, groups=D, bias=config.conv_bias)
        self.x_proj = nn.Linear(D, R + 2 * N, bias=False)
        self.dt_proj = nn.Linear(R, D)
        self.A_log = nn.Parameter(torch.arange(1.0, N + 1).log().repeat(D, 1))
        self.D = nn.Parameter(torch.ones(D))
        self.out_proj = nn.Linear(D, config.d_model, bias=config.proj_bias)
        self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: MambaConfig) -> None:
        """As state-spaces: step sizes log-uniform in [0.001, 0.1], scaled residuals."""
        nn.init.uniform_(self.dt_proj.weight, -(config.dt_rank**-0.5), config.dt_rank**-0.5)
        step = torch.empty(config.d_inner).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_proj.bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives step back
        self.out_proj.weight.div_(math.sqrt(config.n_layer))
        for projection in (self.in_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(b, l, d_model) → (b, l, d_model)."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(_causal_conv(u, self.conv1d.weight, self.conv1d.bias))
        delta, B, C = self._selected(u)
        y = selective_scan(
            u.mT,
            delta.mT,
            -torch.exp(wide(self.A_log)),
            B.mT,
            C.mT,
            wide(self.D),
            z.mT,
            wide(self.dt_proj.bias),
            delta_softplus=True,
        )
        projected: Tensor = self.out_proj(y.mT)
        return projected

    def step(self, x: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, ...]:
        """One token, (b, 1, d_model), and states (b, D, W-1) and (b, D, N) → the same after it."""
        u, z = self.in_proj(x.squeeze(1)).chunk(2, dim=-1)
        u, new_conv = filtered(u, conv_state, self.conv1d)
        delta, B, C = self._selected(u)
        y, new_ssm = advanced(
            ssm_state,
            u,
            delta,
            -torch.exp(wide(self.A_log)),
            B,
            C,
            wide(self.D),
            z,
            wide(self.dt_proj.bias),
        )
        return self.out_proj(y).unsqueeze(1), new_conv, new_ssm

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(D, W-1) and (D, N)."""
        D, N = self.A_log.shape
        return (D, self.conv1d.weight.shape[-1] - 1), (D, N)

    def _selected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """delta, whose bias is added inside the scan, B and C."""
        N, R = self.A_log.shape[1], self.dt_proj.in_features
        low_rank, B, C = self.x_proj(u).split([R, N, N], dim=-1)
        return F.linear(low_rank, self.dt_proj.weight), B, C


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Depthwise causal convolution along time: (b, l, D) by (D, 1, W) and (D,) → (b, l, D).

    A sum of W shifted products. It keeps the channels last, where a convolution operator would
    return them first and cost two copies, and sums in float32 at least, as the CUDA kernel does.
    """
    length, width = x.shape[1], weight.shape[-1]
    taps = wide(weight)
    # Not F.pad: torch cannot trace its backward, a negative pad, while the length is free.
    before = x.new_zeros((x.shape[0], width - 1, x.shape[2]))
    padded = wide(torch.cat([before, x], dim=1))
    total = padded[:, :length] * taps[:, 0, 0]
    for k in range(1, width):
        total = total + padded[:, k : k + length] * taps[:, 0, k]
    if bias is not None:
        total = total + wide(bias)
    return cast(total, x.dtype)


# --- what the exporter asks of an architecture ---------------------------------------------------

# Vim and VideoMamba scan in both directions and keep state-spaces' other names.
_BIDIRECTIONAL = re.compile(r".*\.mixer\.(A_b_log|D_b|conv1d_b|x_proj_b|dt_proj_b)(\..*)?")


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The configuration, as JSON data, of a Mamba-1 language model; None if it is another model.

    Sizes come from the shapes. What shapes do not say (`norm_epsilon`, `residual_in_fp32`) comes
    from the checkpoint's config, at its top or one level below; else state-spaces' defaults hold,
    and the key `assumed` names what is so.

    The names may be prefixed, and be state-spaces' or Hugging Face's.

    Raises:
        Missing: it is Mamba-1, but layers are absent, or the config contradicts the weights; or
            it may be FalconMamba just as well, whose norms of B, C and delta have no weights.
    """
    found = recognition.find(checkpoint)
    if found is None or any(map(_BIDIRECTIONAL.fullmatch, found.tensors)):
        return None
    parts = ("A_log", "conv1d.weight", "dt_proj.weight", "x_proj.weight")
    match [found.shape(name) for name in parts]:
        case [(d_inner, d_state), (_, 1, d_conv), (_, dt_rank), (_, _)]:
            pass
        case _:
            return None  # Mamba-2 among others: its A_log has one dimension, and there is no x_proj
    kind = found.settings.get(("model_type",), str, "" if found.huggingface else "mamba")
    if not kind:
        raise Missing(
            f"{show(checkpoint.path)}: the names are transformers', and the weights alone do not"
            " tell Mamba from FalconMamba; give a folder with the config.json, or model_type in the"
            " checkpoint's configuration"
        )
    if kind != "mamba":
        return None
    config = MambaConfig(
        **found.common("Mamba-1"),
        d_state=d_state,
        d_conv=d_conv,
        d_inner=d_inner,
        dt_rank=dt_rank,
    )
    return asdict(config) | {"assumed": found.assumed()}


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration from `recognise`, its weights on the meta device until set.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    settings = parsed(MambaConfig, config, "mamba")
    with torch.device("meta"):
        module = MambaLM(settings)
    keeps = ("A_log", ".D", "dt_proj.bias")
    return built(module, "mamba", config, keeps, recognition.renamed)
