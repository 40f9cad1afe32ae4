"""Mamba-1 language models: embedding, blocks of a selective scan, a head.

Architecture and parameter names are those of github.com/state-spaces/mamba (Gu & Dao, 2023); the
code is our own. b batch, l length, D = d_inner channels, N = d_state, W = d_conv, R = dt_rank.
Activations stay (b, l, channels) in memory throughout; the scan gets transposed views.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models.model import Model
from fuseport.exporter.models.weights import unwrap
from fuseport.exporter.program import TensorSpec
from fuseport.ops.selective_scan import selective_scan

__all__ = ["MambaConfig", "MambaLM", "model", "recognise"]


@dataclass(frozen=True)
class MambaConfig:
    """What Mamba-1 language models differ in.

    Attributes:
        d_model: width of the residual stream.
        n_layer: blocks, each with one scan.
        vocab_size: rows of the embedding, padding included.
        d_state: N, states per channel.
        d_conv: W, the causal filter's width.
        d_inner: D, channels of the scan.
        dt_rank: R, the step size's inner width.
        norm_epsilon: of every norm.
        rms_norm: RMSNorm; LayerNorm otherwise.
        residual_in_fp32: the residual stream is float32 at least, whatever the weights' dtype.
        tie_embeddings: the head's weight is the embedding's.
        conv_bias: the causal filter has a bias.
        proj_bias: in_proj and out_proj have one.

    Raises:
        ValueError: a size is no positive whole number, or the epsilon is not positive and finite.
    """

    d_model: int
    n_layer: int
    vocab_size: int
    d_state: int
    d_conv: int
    d_inner: int
    dt_rank: int
    norm_epsilon: float = 1e-5
    rms_norm: bool = True
    residual_in_fp32: bool = True
    tie_embeddings: bool = True
    conv_bias: bool = True
    proj_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type:
                raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} is {value}, expected 1 or more")
        if not 0 < self.norm_epsilon < math.inf:
            raise ValueError(f"norm_epsilon is {self.norm_epsilon}, expected a positive number")


class MambaLM(nn.Module):
    """A Mamba-1 language model with state-spaces' parameter names and initial values."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = _Backbone(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args:
            input_ids: (b, l) int64, in [0, vocab_size); l from 1 up.

        Returns:
            (b, l, vocab_size), in the weights' dtype.
        """
        logits: Tensor = self.lm_head(_cast(self.backbone(input_ids), self.lm_head.weight.dtype))
        return logits


class _Backbone(nn.Module):
    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.n_layer))
        self.norm_f = _Norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        residual: Tensor = self.embedding(input_ids)
        if self.residual_in_fp32:
            residual = _wide(residual)
        for layer in self.layers:
            residual = residual + layer(residual)
        normed: Tensor = self.norm_f(residual)
        return normed


class _Block(nn.Module):
    """What a block adds to the residual stream."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.norm = _Norm(config)
        self.mixer = _Mixer(config)

    def forward(self, residual: Tensor) -> Tensor:
        added: Tensor = self.mixer(_cast(self.norm(residual), self.mixer.in_proj.weight.dtype))
        return added


class _Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, over the last dimension; computed in float32 at least."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = None if config.rms_norm else nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = _wide(x), _wide(self.weight)
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, weight, _wide(self.bias), self.epsilon)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * weight


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
        N, R = self.A_log.shape[1], self.dt_proj.in_features
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(_causal_conv(u, self.conv1d.weight, self.conv1d.bias))
        low_rank, B, C = self.x_proj(u).split([R, N, N], dim=-1)
        delta = F.linear(low_rank, self.dt_proj.weight)  # its bias is added inside the scan
        y = selective_scan(
            u.mT,
            delta.mT,
            -torch.exp(_wide(self.A_log)),
            B.mT,
            C.mT,
            _wide(self.D),
            z.mT,
            _wide(self.dt_proj.bias),
            delta_softplus=True,
        )
        projected: Tensor = self.out_proj(y.mT)
        return projected


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Depthwise causal convolution along time: (b, l, D) by (D, 1, W) and (D,) → (b, l, D).

    A sum of W shifted products. It keeps the channels last, where a convolution operator would
    return them first and cost two copies, and sums in float32 at least, as the CUDA kernel does.
    """
    length, width = x.shape[1], weight.shape[-1]
    taps = _wide(weight)
    # Not F.pad: torch cannot trace its backward, a negative pad, while the length is free.
    before = x.new_zeros((x.shape[0], width - 1, x.shape[2]))
    padded = _wide(torch.cat([before, x], dim=1))
    total = padded[:, :length] * taps[:, 0, 0]
    for k in range(1, width):
        total = total + padded[:, k : k + length] * taps[:, 0, k]
    if bias is not None:
        total = total + _wide(bias)
    return _cast(total, x.dtype)


def _wide(x: Tensor) -> Tensor:
    """`x` in float32 at least: half types are raised, float64 stays."""
    return _cast(x, torch.promote_types(x.dtype, torch.float32))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`. A cast that changes nothing would still leave a node in an exported graph."""
    return x if x.dtype == dtype else x.to(dtype)


# --- what the exporter asks of an architecture ---------------------------------------------------

_A_LOG = re.compile(r"(?:.*\.)?backbone\.layers\.(\d+)\.mixer\.A_log")
# Vim and VideoMamba scan in both directions and keep state-spaces' other names.
_BIDIRECTIONAL = re.compile(r".*\.mixer\.(A_b_log|D_b|conv1d_b|x_proj_b|dt_proj_b)(\..*)?")
_HUGGING_FACE = re.compile(r"(?<![^.])backbone\.embeddings\.weight$")
_EPSILON = ("norm_epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
_TIED = ("tie_embeddings", "tie_word_embeddings")


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The configuration, as JSON data, of a Mamba-1 language model; None if it is another model.

    Sizes come from the shapes. What shapes do not say (`norm_epsilon`, `residual_in_fp32`) comes
    from the checkpoint's config, at its top or one level below; else state-spaces' defaults hold,
    and the key `assumed` names what is so. A FalconMamba without its config.json cannot be told
    apart: its extra norms have no weights.

    The names may be prefixed, and be state-spaces' or Hugging Face's.

    Raises:
        Missing: it is Mamba-1, but layers are absent, or the config contradicts the weights.
    """
    tensors = _renamed(checkpoint.tensors)
    other = checkpoint.config.get("model_type", "mamba") != "mamba"
    if other or any(map(_BIDIRECTIONAL.fullmatch, tensors)):
        return None
    found = {int(m[1]): name for name in tensors if (m := _A_LOG.fullmatch(name))}
    if not found:
        return None
    first = min(found)
    prefix = found[first].removesuffix(f"backbone.layers.{first}.mixer.A_log")
    shapes = {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    mixer = f"backbone.layers.{first}.mixer"
    match [shapes.get(name) for name in (
        "backbone.embedding.weight", f"{mixer}.A_log", f"{mixer}.conv1d.weight",
        f"{mixer}.dt_proj.weight", f"{mixer}.x_proj.weight",
    )]:  # fmt: skip
        case [(vocab_size, d_model), (d_inner, d_state), (_, 1, d_conv), (_, dt_rank), (_, _)]:
            pass
        case _:
            return None  # Mamba-2 among others: its A_log has one dimension, and there is no x_proj
    settings = _Settings(checkpoint.config, checkpoint.path)
    n_layer = settings.get(("n_layer", "num_hidden_layers"), int, max(found) + 1)
    if len(found) != n_layer or max(found) != n_layer - 1:
        raise Missing(
            f"{show(checkpoint.path)}: backbone.layers: {len(found)} Mamba-1 layers, up to number"
            f" {max(found)}, where {n_layer} are expected; give the whole checkpoint"
        )
    config = MambaConfig(
        d_model=d_model,
        n_layer=n_layer,
        vocab_size=vocab_size,
        d_state=d_state,
        d_conv=d_conv,
        d_inner=d_inner,
        dt_rank=dt_rank,
        norm_epsilon=settings.get(_EPSILON, float, 1e-5),
        rms_norm="backbone.norm_f.bias" not in shapes,
        residual_in_fp32=settings.get(("residual_in_fp32",), bool, True),
        tie_embeddings=_tied(tensors, prefix, settings),
        conv_bias=f"{mixer}.conv1d.bias" in shapes,
        proj_bias=f"{mixer}.in_proj.bias" in shapes,
    )
    assumed = [] if settings.find(_EPSILON) else ["norm_epsilon"]
    return asdict(config) | {"assumed": assumed}


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration from `recognise`, its weights on the meta device until set.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    known = {field.name for field in fields(MambaConfig)}
    try:
        settings = MambaConfig(**{name: config[name] for name in known})
    except (KeyError, ValueError) as error:
        raise CorruptInput(
            f"a mamba configuration: {show(error)}; export the model again"
        ) from error
    with torch.device("meta"):
        module = MambaLM(settings)
    return Model(
        module=module,
        architecture="mamba",
        config=dict(config),
        inputs=(TensorSpec("input_ids", "int64", ("batch", "length"), settings.vocab_size),),
        sizes={"batch": 2, "length": 16},
        outputs=("logits",),
        scans=settings.n_layer,
        keeps_float32=("A_log", ".D", "dt_proj.bias"),
        renamed=_renamed,
        notes=tuple(
            f"the checkpoint does not say {name}: {getattr(settings, name)} is assumed,"
            " state-spaces' default"
            for name in config.get("assumed", ())
        ),
    )


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under state-spaces' names; Hugging Face's `embeddings` and wrappers undone."""
    names = unwrap(tensors)
    return {_HUGGING_FACE.sub("backbone.embedding.weight", names[n]): t for n, t in tensors.items()}


def _tied(tensors: Mapping[str, Tensor], prefix: str, settings: "_Settings") -> bool:
    """The weights decide; the config only where they are equal, or to contradict."""
    head = tensors.get(f"{prefix}lm_head.weight")
    embedding = tensors[f"{prefix}backbone.embedding.weight"]
    equal = head is None or head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    tied = settings.get(_TIED, bool, equal)
    if tied and not equal:
        raise Missing(
            f"{show(settings.path)}: lm_head.weight: tied to the embedding by the config, but not"
            " equal to it; correct the config or the weights"
        )
    return tied


_Value = TypeVar("_Value", int, float, bool)


@dataclass(frozen=True)
class _Settings:
    """Looks names up in a config: at its top first, then one level below."""

    config: Mapping[str, Any]
    path: Path

    def find(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        for level in (self.config, *(v for v in self.config.values() if isinstance(v, Mapping))):
            for name in names:
                if name in level:
                    return name, level[name]
        return None

    def get(self, names: tuple[str, ...], kind: type[_Value], default: _Value) -> _Value:
        found = self.find(names)
        if found is None:
            return default
        name, value = found
        if type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
        raise Missing(
            f"{show(self.path)}: {name}: it is {show(repr(value), 40)}, expected {kind.__name__};"
            " correct the config"
        )
