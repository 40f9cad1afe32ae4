"""Mamba-2 language models: embedding, blocks of a chunked scan with a gated norm, a head.

Architecture and parameter names are those of github.com/state-spaces/mamba (Dao & Gu, 2024, section
7); the code is our own. b batch, l length, H heads of width P, G groups, N = d_state, W = d_conv.
"""

import math
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
    parsed,
    wide,
)
from fuseport.exporter.models.model import Model
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.rms_norm_gated import rms_norm_gated
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan

__all__ = ["SIGNS", "Mamba2Config", "Mamba2LM", "model", "recognise"]

SIGNS = (
    "*backbone.embedding*.weight",
    "*backbone.layers.*.mixer.A_log",
    "*backbone.layers.*.mixer.dt_bias",
    "*backbone.layers.*.mixer.conv1d.weight",
    "*backbone.layers.*.mixer.in_proj.weight",
)


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(LanguageModelConfig):
    """What Mamba-2 language models differ in, beside what all language models do.

    Attributes:
        d_state: N, states per channel.
        d_conv: W, the causal filter's width.
        n_heads: H.
        d_ssm: H·P, channels of the scan.
        d_mlp: channels beside them that only pass a gate; 0 in all published models.
        n_groups: G, sets of B and C, and of channels that the norm of the mixer takes together.
        mixer_norm: there is a gated norm after the scan; the scan itself is gated otherwise.
        norm_before_gate: norm(y)·SiLU(z), and not norm(y·SiLU(z)).
        mixer_epsilon: of that norm; 1e-5 in state-spaces' models whatever `norm_epsilon` is.
        D_has_hdim: D has a number for each channel, and not for each head.
        dt_min: the least step size.
        dt_max: the largest; None for no limit.
    """

    d_state: int
    d_conv: int
    n_heads: int
    d_ssm: int
    d_mlp: int = 0
    n_groups: int = 1
    mixer_norm: bool = True
    norm_before_gate: bool = False
    mixer_epsilon: float = 1e-5
    D_has_hdim: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_ssm % self.n_heads or self.n_heads % self.n_groups:
            raise ValueError(
                f"n_heads is {self.n_heads}, which does not divide d_ssm = {self.d_ssm}, or is not"
                f" divided by n_groups = {self.n_groups}"
            )
        if self.dt_max is not None and type(self.dt_max) is not float:
            raise ValueError(f"dt_max is {self.dt_max!r}, expected a number or None")
        if not 0 <= self.dt_min <= self.dt_limit[1]:
            raise ValueError(f"dt_min is {self.dt_min}, dt_max is {self.dt_max}")

    @property
    def dt_limit(self) -> tuple[float, float]:
        """Both bounds."""
        return self.dt_min, math.inf if self.dt_max is None else self.dt_max


class Mamba2LM(LanguageModel):
    """A Mamba-2 language model with state-spaces' parameter names and initial values."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config, lambda: _Mixer(config))


class _Weight(nn.Module):
    """Holds the weight of a norm, under the name that it has in checkpoints."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))


class _Mixer(nn.Module):
    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        coefficients = config.n_groups * config.d_state
        filtered_channels = config.d_ssm + 2 * coefficients
        self.parts = [config.d_ssm, filtered_channels, config.n_heads]
        self.filtered_parts = [config.d_ssm, coefficients, coefficients]
        self.in_proj = nn.Linear(
            config.d_model, 2 * config.d_mlp + sum(self.parts), bias=config.proj_bias
        )
        self.conv1d = nn.Conv1d(
            filtered_channels,
            filtered_channels,
            config.d_conv,
            groups=filtered_channels,
            bias=config.conv_bias,
        )
        self.dt_bias = nn.Parameter(torch.empty(config.n_heads))
        self.A_log = nn.Parameter(torch.empty(config.n_heads))
        self.D = nn.Parameter(torch.ones(config.d_ssm if config.D_has_hdim else config.n_heads))
        self.norm = _Weight(config.d_ssm) if config.mixer_norm else None
        self.out_proj = nn.Linear(
            config.d_ssm + config.d_mlp, config.d_model, bias=config.proj_bias
        )
        self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: Mamba2Config) -> None:
        """As state-spaces: step sizes log-uniform in [0.001, 0.1], rates uniform in [1, 16]."""
        step = torch.empty(config.n_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives step back
        self.A_log.uniform_(1, 16).log_()
        self.out_proj.weight.div_(math.sqrt(config.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        """(b, l, d_model) → (b, l, d_model)."""
        config = self.config
        beside, z, inputs, dt = self._projected(x)
        weight = self.conv1d.weight.squeeze(1)
        inputs = causal_conv1d(inputs.mT, weight, self.conv1d.bias, activation="silu").mT
        u, B, C = self._parts(inputs)
        y = ssd_chunk_scan(
            u,
            dt,
            -torch.exp(wide(self.A_log)),
            B,
            C,
            D=self._skip(),
            z=None if self.norm is not None else z.unflatten(-1, (config.n_heads, -1)),
            dt_bias=wide(self.dt_bias),
            dt_softplus=True,
            dt_limit=config.dt_limit,
        )
        return self._joined(beside, y.flatten(-2), z)

    def step(self, x: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, ...]:
        """One token, (b, 1, d_model), and states as in `state_shapes` → the same after it."""
        beside, z, inputs, dt = self._projected(x.squeeze(1))
        inputs, new_conv = filtered(inputs, conv_state, self.conv1d)
        u, B, C = self._parts(inputs)
        heads, width = u.shape[1:]
        bias = wide(self.dt_bias)
        low, high = (_inverse_softplus(bound) for bound in self.config.dt_limit)
        if self.config.dt_limit != (0.0, math.inf):
            # The op has no limits; what softplus grows to within them is within these.
            dt = dt.clamp((low - bias).to(dt.dtype), (high - bias).to(dt.dtype))
        rates = -torch.exp(wide(self.A_log))
        y, new_ssm = advanced(
            ssm_state,
            u,
            dt[..., None].expand(-1, -1, width),
            rates[:, None, None].expand(-1, width, self.config.d_state),
            B,
            C,
            self._skip().view(heads, -1).expand(-1, width),
            None if self.norm is not None else z.unflatten(-1, (heads, width)),
            bias[:, None].expand(-1, width),
        )
        return self._joined(beside, y.flatten(-2), z).unsqueeze(1), new_conv, new_ssm

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(H·P + 2·G·N, W-1) and (H, P, N)."""
        config = self.config
        width = config.d_ssm // config.n_heads
        return (self.parts[1], config.d_conv - 1), (config.n_heads, width, config.d_state)

    def _projected(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """What passes beside the scan, if anything; the gate, the filter's inputs, step sizes."""
        projected: Tensor = self.in_proj(x)
        if self.config.d_mlp == 0:
            return (None, *projected.split(self.parts, dim=-1))
        d_mlp = self.config.d_mlp
        gate, beside, *parts = projected.split([d_mlp, d_mlp, *self.parts], dim=-1)
        z, inputs, dt = parts
        return F.silu(gate) * beside, z, inputs, dt

    def _parts(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(…, H·P + 2·G·N) → u (…, H, P), B and C (…, G, N)."""
        u, B, C = inputs.split(self.filtered_parts, dim=-1)
        heads, groups = self.config.n_heads, self.config.n_groups
        return u.unflatten(-1, (heads, -1)), *(t.unflatten(-1, (groups, -1)) for t in (B, C))

    def _skip(self) -> Tensor:
        skip = wide(self.D)
        return skip.view(self.config.n_heads, -1) if self.config.D_has_hdim else skip

    def _joined(self, beside: Tensor | None, y: Tensor, z: Tensor) -> Tensor:
        config = self.config
        if self.norm is not None:
            y = rms_norm_gated(
                y,
                z,
                self.norm.weight,
                config.mixer_epsilon,
                config.d_ssm // config.n_groups,
                config.norm_before_gate,
            )
        if beside is not None:
            y = torch.cat([beside, y], dim=-1)
        projected: Tensor = self.out_proj(y)
        return projected


def _inverse_softplus(value: float) -> float:
    """What softplus, the identity above 20, makes `value` of."""
    if value == 0.0:
        return -math.inf
    return value if value > 20.0 else value + math.log(-math.expm1(-value))


# --- what the exporter asks of an architecture ---------------------------------------------------

_GROUPS, _STATES = ("ngroups", "n_groups"), ("d_state", "state_size")


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The configuration, as JSON data, of a Mamba-2 language model; None if it is another model.

    Sizes come from the shapes. What shapes do not say (the number of groups, the norm's order,
    limits of the step size) comes from the checkpoint's config, at its top or one level below, such
    as in `ssm_cfg`; else state-spaces' defaults hold, and the key `assumed` names what is so.

    The names may be prefixed, and be state-spaces' (Mistral's are) or Hugging Face's.

    Raises:
        Missing: it is Mamba-2, but layers are absent or of another kind, or the config contradicts
            the weights; or the names are Hugging Face's, where nothing says how many groups.
    """
    found = recognition.find(checkpoint)
    if found is None:
        return None
    parts = ("A_log", "dt_bias", "conv1d.weight", "in_proj.weight", "out_proj.weight", "D")
    match [found.shape(name) for name in parts]:
        case [(heads,), (_,), (filtered_channels, 1, d_conv), (rows, _), (_, d_inner), (skips,)]:
            pass
        case _:
            return None
    settings = found.settings
    # mamba_ssm has one class for both generations, and Mistral's params.json says "mamba" of it.
    kinds = ("mamba2",) if found.huggingface else ("mamba2", "mamba")
    if settings.get(("model_type",), str, "mamba2") not in kinds:
        return None
    d_mlp = rows - filtered_channels - heads - d_inner
    d_ssm = d_inner - d_mlp
    coefficients, odd = divmod(filtered_channels - d_ssm, 2)
    assumed = found.assumed()
    if settings.find(_GROUPS) is None and settings.find(_STATES) is None:
        if found.huggingface:
            raise Missing(
                f"{show(checkpoint.path)}: the weights of a Mamba-2 do not tell how many groups it"
                " has; give a folder with the config.json, or n_groups in the checkpoint's"
                " configuration"
            )
        assumed.append("n_groups")
    d_state = settings.get(_STATES, int, 0)
    n_groups = settings.get(_GROUPS, int, coefficients // d_state if d_state > 0 else 1)
    d_state = d_state or coefficients // max(n_groups, 1)
    low, high = _limit(settings)
    try:
        config = Mamba2Config(
            **found.common("Mamba-2"),
            d_state=d_state,
            d_conv=d_conv,
            n_heads=heads,
            d_ssm=d_ssm,
            d_mlp=d_mlp,
            n_groups=n_groups,
            mixer_norm=found.shape("norm.weight") is not None,
            norm_before_gate=settings.get(("norm_before_gate",), bool, False),
            # transformers gives all norms one; in state-spaces' models this one is fixed.
            mixer_epsilon=settings.get(("layer_norm_epsilon",), float, 1e-5),
            D_has_hdim=skips != heads,
            dt_min=low,
            dt_max=high,
        )
    except ValueError as error:
        raise Missing(
            f"{show(checkpoint.path)}: {found.mixer}: a Mamba-2 of these shapes makes no sense:"
            f" {show(error)}; correct the config or give the whole checkpoint"
        ) from error
    if odd or config.n_groups * config.d_state != coefficients or skips not in (heads, d_ssm):
        raise Missing(
            f"{show(checkpoint.path)}: {found.mixer}: {coefficients} coefficients are not"
            f" {n_groups} groups of {d_state} states, or D is not for heads or channels; correct"
            " the config"
        )
    return asdict(config) | {"assumed": assumed}


def _limit(settings: recognition.Settings) -> tuple[float, float | None]:
    """The bounds of step sizes; transformers writes infinity as an object."""
    for name in ("dt_limit", "time_step_limit"):
        bounds = settings.get_list(name)
        if not bounds:
            continue
        numbers = [float(b["__float__"]) if isinstance(b, dict) else b for b in bounds]
        match numbers:
            case [int() | float() as low, int() | float() as high]:
                return float(low), None if math.isinf(high) else float(high)
        raise Missing(f"{show(settings.path)}: {name}: it is not two numbers; correct the config")
    return 0.0, None


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration from `recognise`, its weights on the meta device until set.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    settings = parsed(Mamba2Config, config, "mamba2")
    with torch.device("meta"):
        module = Mamba2LM(settings)
    return built(module, "mamba2", config, ("A_log", ".D", "dt_bias"), recognition.renamed)
