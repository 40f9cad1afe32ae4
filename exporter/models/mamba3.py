"""Mamba-3 language models: embedding, blocks of a scan by the trapezoidal rule, a head.

Architecture and parameter names are those of github.com/state-spaces/mamba, version 2.3 (Lahoti et
al., 2026); the code is our own. b batch, l length, H heads of width P, G groups, N states, R ranks:
1, or those of a "MIMO" model.
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
from fuseport.exporter.models._language_model import (
    Decoder,
    LanguageModel,
    LanguageModelConfig,
    built,
    parsed,
    wide,
)
from fuseport.exporter.models.model import Model
from fuseport.ops.compositions.mamba3 import (
    mamba3_mimo,
    mamba3_mimo_step,
    mamba3_siso,
    mamba3_siso_step,
)
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated

__all__ = ["SIGNS", "Mamba3Config", "Mamba3LM", "model", "recognise"]

SIGNS = (
    "*backbone.embedding*.weight",
    "*backbone.layers.*.mixer.B_bias",
    "*backbone.layers.*.mixer.C_bias",
    "*backbone.layers.*.mixer.dt_bias",
    "*backbone.layers.*.mixer.in_proj.weight",
)

_EPSILON = 1e-5
"""Of the norms in a mixer, whatever `norm_epsilon` is."""


@dataclass(frozen=True, kw_only=True)
class Mamba3Config(LanguageModelConfig):
    """What Mamba-3 language models differ in, beside what all language models do.

    Attributes:
        d_state: N.
        n_heads: H.
        d_inner: H·P, channels of the scan.
        n_groups: G, sets of B and C.
        n_ranks: R.
        n_angles: pairs of states that are turned: N/4 or N/2.
        mimo: each rank has weights of its own for values, gates and results.
        mixer_norm: there is a gated norm by heads after the scan; the scan is gated otherwise.
        A_floor: the least rate of decay.
    """

    d_state: int
    n_heads: int
    d_inner: int
    n_groups: int = 1
    n_ranks: int = 1
    n_angles: int
    mimo: bool = False
    mixer_norm: bool = False
    A_floor: float = 1e-4
    conv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_inner % self.n_heads or self.n_heads % self.n_groups:
            raise ValueError(
                f"n_heads is {self.n_heads}, which does not divide d_inner = {self.d_inner}, or is"
                f" not divided by n_groups = {self.n_groups}"
            )
        if self.d_state % 2 or self.n_angles not in (self.d_state // 4, self.d_state // 2):
            raise ValueError(f"n_angles is {self.n_angles} for d_state = {self.d_state}")
        if self.n_ranks != 1 and not self.mimo:
            raise ValueError(f"n_ranks is {self.n_ranks}, expected 1 where mimo is not set")
        if not 0 <= self.A_floor < math.inf:
            raise ValueError(f"A_floor is {self.A_floor}, expected a number from 0 up")


class Mamba3LM(LanguageModel):
    """A Mamba-3 language model with state-spaces' parameter names and initial values."""

    def __init__(self, config: Mamba3Config) -> None:
        super().__init__(config, lambda: _Mixer(config))


class _Decoder(Decoder):
    STATES = (
        ("angle_states", True),
        ("ssm_states", True),
        ("k_states", False),
        ("v_states", False),
    )

    def forward(
        self,
        input_ids: Tensor,
        angle_states: Tensor,
        ssm_states: Tensor,
        k_states: Tensor,
        v_states: Tensor,
        *attended: Tensor,
    ) -> tuple[Tensor, ...]:
        """Logits of the token after this one, and the states after it.

        Args:
            input_ids: (b, 1) int64.
            angle_states: (scans, b, H, angles), float32 at least, like the next; all are zeros
                before the first token.
            ssm_states: (scans, b, H, P, N).
            k_states: (scans, b, R, H, N), of the last token, in the activations' dtype.
            v_states: (scans, b, H, P), likewise.
            attended: of layers of attention, as in `FilteredDecoder`.

        Returns:
            logits (b, 1, vocab_size), and the states.
        """
        return self.stepped(input_ids, angle_states, ssm_states, k_states, v_states, *attended)


class _Weight(nn.Module):
    """Holds the weight of a norm, under the name that it has in checkpoints."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))


class _Mixer(nn.Module):
    def __init__(self, config: Mamba3Config) -> None:
        super().__init__()
        self.config = config
        heads, ranks, d_inner = config.n_heads, config.n_ranks, config.d_inner
        coefficients = config.n_groups * config.d_state * ranks
        self.parts = [d_inner, d_inner, coefficients, coefficients, *[heads] * 3, config.n_angles]
        self.in_proj = nn.Linear(config.d_model, sum(self.parts), bias=config.proj_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.B_bias = nn.Parameter(torch.ones(heads, ranks, config.d_state))
        self.C_bias = nn.Parameter(torch.ones(heads, ranks, config.d_state))
        self.B_norm = _Weight(config.d_state)
        self.C_norm = _Weight(config.d_state)
        if config.mimo:
            ones = torch.ones(heads, ranks, d_inner // heads)
            self.mimo_x = nn.Parameter(ones / ranks)
            self.mimo_z = nn.Parameter(ones.clone())
            self.mimo_o = nn.Parameter(ones / ranks)
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = _Weight(d_inner) if config.mixer_norm else None
        self.out_proj = nn.Linear(d_inner, config.d_model, bias=config.proj_bias)
        self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: Mamba3Config) -> None:
        """As state-spaces: step sizes log-uniform in [0.001, 0.1]."""
        step = torch.empty(config.n_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives step back
        self.out_proj.weight.div_(math.sqrt(config.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        """(b, l, d_model) → (b, l, d_model)."""
        given, z = self._projected(x)
        y = mamba3_mimo(**given) if self.config.mimo else mamba3_siso(**given)
        assert isinstance(y, Tensor)
        return self._ended(y, z)

    def step(
        self, x: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor
    ) -> tuple[Tensor, ...]:
        """One token, (b, 1, d_model), and states as in `state_shapes` → the same after it."""
        given, z = self._projected(x.squeeze(1))
        if self.config.mimo:
            before = (angle_state, ssm_state, k_state, v_state)
            y, states = mamba3_mimo_step(**given, Input_States=before)
        else:
            before = (angle_state, ssm_state, k_state.squeeze(1), v_state)
            y, (angle, ssm, k, v) = mamba3_siso_step(**given, Input_States=before)
            states = (angle, ssm, k.unsqueeze(1), v)
        return self._ended(y, z).unsqueeze(1), *states

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(H, angles), (H, P, N), (R, H, N) and (H, P)."""
        config = self.config
        heads, width = config.n_heads, config.d_inner // config.n_heads
        return (
            (heads, config.n_angles),
            (heads, width, config.d_state),
            (config.n_ranks, heads, config.d_state),
            (heads, width),
        )

    def _projected(self, x: Tensor) -> tuple[dict[str, Any], Tensor]:
        """What the scan takes, (b, l, …) or (b, …), and the gate."""
        config = self.config
        z, v, B, C, steps, rates, trap, angles = self.in_proj(x).split(self.parts, -1)
        rates = wide(rates)
        decay = rates.clamp(min=0.0) + torch.reciprocal(1.0 - rates.clamp(max=0.0))
        delta = F.softplus(wide(steps) + wide(self.dt_bias))
        shape = (config.n_ranks, config.n_groups, config.d_state)
        Q, K = (
            rms_norm(t.unflatten(-1, shape), norm.weight, _EPSILON)
            for t, norm in ((C, self.C_norm), (B, self.B_norm))
        )
        q_bias, k_bias = wide(self.C_bias), wide(self.B_bias)
        gate = z.unflatten(-1, (config.n_heads, -1))
        rest: dict[str, Any] = {"Z": None if config.mixer_norm else gate}
        if config.mimo:
            rest = {
                "Z": gate,
                "MIMO_V": wide(self.mimo_x),
                "MIMO_Z": wide(self.mimo_z),
                "MIMO_Out": wide(self.mimo_o),
                "rotary_dim_divisor": 2 if 2 * config.n_angles == config.d_state else 4,
                "fuse_pregate_headwise_rms_norm": config.mixer_norm,
                "outproj_norm_weight": None if self.norm is None else self.norm.weight,
                "outproj_norm_eps": _EPSILON,
            }
        else:
            Q, K, q_bias, k_bias = Q.squeeze(-3), K.squeeze(-3), q_bias[:, 0], k_bias[:, 0]
        given = {
            "Q": Q.to(v.dtype),
            "K": K.to(v.dtype),
            "V": v.unflatten(-1, (config.n_heads, -1)),
            "ADT": -(decay.clamp(min=config.A_floor) * delta).movedim(-1, 1),
            "DT": delta.movedim(-1, 1),
            "Trap": trap.movedim(-1, 1),
            "Q_bias": q_bias,
            "K_bias": k_bias,
            "Angles": wide(angles).unsqueeze(-2),
            "D": wide(self.D),
        }
        return given | rest, z

    def _ended(self, y: Tensor, z: Tensor) -> Tensor:
        config = self.config
        y = y.flatten(-2)
        if self.norm is not None and not config.mimo:
            width = config.d_inner // config.n_heads
            y = rms_norm_gated(y, z, self.norm.weight, _EPSILON, width, True)
        projected: Tensor = self.out_proj(y)
        return projected


# --- what the exporter asks of an architecture ---------------------------------------------------


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The configuration, as JSON data, of a Mamba-3 language model; None if it is another model.

    Sizes come from the shapes, which tell all but the norm's epsilon and the least rate of decay:
    these are in the checkpoint's config, at its top or one level below, such as in `ssm_cfg`, else
    state-spaces' defaults hold, and the key `assumed` names what is so.

    Raises:
        Missing: it is Mamba-3, but layers are absent or of another kind, or the config contradicts
            the weights.
    """
    found = recognition.find(checkpoint, "B_bias")
    if found is None:
        return None
    parts = ("B_bias", "C_bias", "dt_bias", "B_norm.weight", "in_proj.weight", "out_proj.weight")
    match [found.shape(name) for name in parts]:
        case [(heads, ranks, d_state), (_, _, _), (_,), (_,), (rows, _), (_, d_inner)]:
            pass
        case _:
            return None
    rest = rows - 2 * d_inner - 3 * heads
    n_groups, n_angles = divmod(rest, 2 * d_state * ranks)
    mimo = found.shape("mimo_x") is not None
    settings = found.settings
    assumed = found.assumed()
    if settings.find(("A_floor", "ssm_cfg")) is None:
        assumed.append("A_floor")
    try:
        config = Mamba3Config(
            **found.common("Mamba-3"),
            d_state=d_state,
            n_heads=heads,
            d_inner=d_inner,
            n_groups=n_groups,
            n_ranks=ranks,
            n_angles=n_angles,
            mimo=mimo,
            mixer_norm=found.shape("norm.weight") is not None,
            A_floor=settings.get(("A_floor",), float, 1e-4),
        )
    except ValueError as error:
        raise Missing(
            f"{show(checkpoint.path)}: {found.mixer}: a Mamba-3 of these shapes makes no sense:"
            f" {show(error)}; correct the config or give the whole checkpoint"
        ) from error
    said = {
        "d_state": d_state,
        "ngroups": n_groups,
        "headdim": d_inner // heads,
        "is_mimo": mimo,
        "is_outproj_norm": config.mixer_norm,
        "mimo_rank": ranks if mimo else settings.get(("mimo_rank",), int, 0),
    }
    for name, value in said.items():
        if settings.get((name,), type(value), value) != value:
            raise Missing(
                f"{show(checkpoint.path)}: {found.mixer}: {name} is {value} by the weights, and"
                f" {settings.get((name,), type(value), value)} by the config; correct the config"
            )
    return asdict(config) | {"assumed": assumed}


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration from `recognise`, its weights on the meta device until set.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    settings = parsed(Mamba3Config, config, "mamba3")
    with torch.device("meta"):
        module = Mamba3LM(settings)
    keeps = ("dt_bias", "B_bias", "C_bias", ".D", ".mimo_x", ".mimo_z", ".mimo_o")
    return built(module, "mamba3", config, keeps, recognition.renamed, _Decoder)
