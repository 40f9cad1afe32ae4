"""What language models of state-space layers have in common: the residual stream, norms, the head,
and decoding token by token.

Architecture and parameter names are those of github.com/state-spaces/mamba (Gu & Dao, 2023); the
code is our own. b batch, l length. Activations stay (b, l, channels) in memory throughout.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec

__all__ = [
    "Decoder",
    "FilteredDecoder",
    "LanguageModel",
    "LanguageModelConfig",
    "Mixer",
    "built",
    "cast",
    "parsed",
    "wide",
]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """What these models differ in, whatever their mixers are.

    Attributes:
        d_model: width of the residual stream.
        n_layer: blocks, each with one scan.
        vocab_size: rows of the embedding, padding included.
        norm_epsilon: of every norm of the residual stream.
        rms_norm: RMSNorm; LayerNorm otherwise.
        residual_in_fp32: the residual stream is float32 at least, whatever the weights' dtype.
        tie_embeddings: the head's weight is the embedding's.
        conv_bias: the causal filter has a bias.
        proj_bias: in_proj and out_proj have one.

    Raises:
        ValueError: a size is no positive whole number, or an epsilon is not positive and finite.
    """

    d_model: int
    n_layer: int
    vocab_size: int
    norm_epsilon: float = 1e-5
    rms_norm: bool = True
    residual_in_fp32: bool = True
    tie_embeddings: bool = True
    conv_bias: bool = True
    proj_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float, bool) and type(value) is not field.type:
                raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
            if field.type is int and value < self.least(field.name):
                least = self.least(field.name)
                raise ValueError(f"{field.name} is {value}, expected {least} or more")
            if field.name.endswith("epsilon") and not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}, expected a positive number")

    @staticmethod
    def least(size: str) -> int:
        """The smallest value of a size that makes sense."""
        del size
        return 1


class Mixer(Protocol):
    """What a block does to its normed input: a module with a scan."""

    in_proj: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        """(b, l, d_model) → (b, l, d_model)."""

    def step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """One token, (b, 1, d_model), and the states before it → the same after it."""

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What decoding carries on for each sequence: the scan's state, and what is beside it."""


class LanguageModel(nn.Module):
    """Logits of the next token at every position, of whole sequences."""

    def __init__(self, config: LanguageModelConfig, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.config = config
        self.backbone = _Backbone(config, mixer)
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
        logits: Tensor = self.lm_head(cast(self.backbone(input_ids), self.lm_head.weight.dtype))
        return logits


class Decoder(nn.Module):
    """One decoding step of a language model: its own parameters, under their own names.

    Its forward takes a token, and states by the names of `STATES`.
    """

    STATES: ClassVar[tuple[tuple[str, bool], ...]]
    """Names, and whether such a state is float32 at least, and not of the activations' dtype."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.lm_head = model.lm_head

    def stepped(self, input_ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Logits, (b, 1, vocab_size), and the states after the token, (n_layer, b, …) each."""
        hidden, *new = self.backbone.step(input_ids, *states)
        return self.lm_head(cast(hidden, self.lm_head.weight.dtype)), *new

    def state_specs(self) -> tuple[TensorSpec, ...]:
        """Of the states, with the dtypes that the weights have by now."""
        mixer: Mixer = self.backbone.mixers()[0]
        dtype = mixer.in_proj.weight.dtype
        count = len(self.backbone.mixers())
        return tuple(
            TensorSpec(name, _name(_wider(dtype) if is_wide else dtype), (count, "batch", *shape))
            for (name, is_wide), shape in zip(self.STATES, mixer.state_shapes(), strict=True)
        )


class FilteredDecoder(Decoder):
    """Of layers with a causal filter before the scan."""

    STATES = (("conv_states", False), ("ssm_states", True))

    def forward(
        self, input_ids: Tensor, conv_states: Tensor, ssm_states: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits of the token after this one, and the states after it.

        Args:
            input_ids: (b, 1) int64.
            conv_states: (n_layer, b, channels, W-1), in the activations' dtype: the inputs of each
                layer's filter before this token, the last one last; zeros before the first token.
            ssm_states: (n_layer, b, …), float32 at least; zeros before the first token.

        Returns:
            logits (b, 1, vocab_size), conv_states, ssm_states.
        """
        return self.stepped(input_ids, conv_states, ssm_states)


class _Backbone(nn.Module):
    def __init__(self, config: LanguageModelConfig, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(_Block(config, mixer()) for _ in range(config.n_layer))
        self.norm_f = _Norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        residual = self._embedded(input_ids)
        for layer in self.layers:
            residual = residual + layer(residual)
        normed: Tensor = self.norm_f(residual)
        return normed

    def step(self, input_ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        residual = self._embedded(input_ids)
        layers = []
        for i, layer in enumerate(self._blocks()):
            added, *new = layer.step(residual, *(state[i] for state in states))
            residual = residual + added
            layers.append(new)
        return self.norm_f(residual), *map(torch.stack, zip(*layers, strict=True))

    def mixers(self) -> "list[Mixer]":
        return [block.mixer for block in self._blocks()]

    def _blocks(self) -> "list[_Block]":
        return [block for block in self.layers if isinstance(block, _Block)]

    def _embedded(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids)
        return wide(embedded) if self.residual_in_fp32 else embedded


class _Block(nn.Module):
    """What a block adds to the residual stream."""

    def __init__(self, config: LanguageModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.norm = _Norm(config)
        self.mixer = mixer

    def forward(self, residual: Tensor) -> Tensor:
        added: Tensor = self.mixer(self._normed(residual))
        return added

    def step(self, residual: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        return self.mixer.step(self._normed(residual), *states)

    def _normed(self, residual: Tensor) -> Tensor:
        return cast(self.norm(residual), self.mixer.in_proj.weight.dtype)


class _Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, over the last dimension; computed in float32 at least."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = None if config.rms_norm else nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = wide(x), wide(self.weight)
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, weight, wide(self.bias), self.epsilon)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * weight


def wide(x: Tensor) -> Tensor:
    """`x` in float32 at least: half types are raised, float64 stays."""
    return cast(x, _wider(x.dtype))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`. A cast that changes nothing would still leave a node in an exported graph."""
    return x if x.dtype == dtype else x.to(dtype)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- what the exporter is told -------------------------------------------------------------------

_Config = TypeVar("_Config", bound=LanguageModelConfig)


def parsed(kind: type[_Config], config: Mapping[str, Any], architecture: str) -> _Config:
    """A configuration from JSON data, other keys left aside.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    try:
        return kind(**{field.name: config[field.name] for field in fields(kind)})
    except (KeyError, ValueError) as error:
        raise CorruptInput(
            f"a {architecture} configuration: {show(error)}; export the model again"
        ) from error


def built(
    module: LanguageModel,
    architecture: str,
    config: Mapping[str, Any],
    keeps_float32: tuple[str, ...],
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    decoder: type[Decoder] = FilteredDecoder,
) -> Model:
    """The model around a module; `assumed` in its config names what the checkpoint left unsaid."""
    settings = module.config
    ids = TensorSpec("input_ids", "int64", ("batch", "length"), settings.vocab_size)

    def step() -> Model:
        stepping = decoder(module)
        token = TensorSpec("input_ids", "int64", ("batch", 1), settings.vocab_size)
        states = stepping.state_specs()
        return Model(
            module=stepping.eval(),
            architecture=architecture,
            config=config,
            inputs=(token, *states),
            sizes={"batch": 2},
            outputs=("logits", *(f"new_{state.name}" for state in states)),
            scans=settings.n_layer,
            differentiable=False,
        )

    return Model(
        module=module,
        architecture=architecture,
        config=dict(config),
        inputs=(ids,),
        sizes={"batch": 2, "length": 16},
        outputs=("logits",),
        scans=settings.n_layer,
        keeps_float32=keeps_float32,
        renamed=renamed,
        notes=tuple(
            f"the checkpoint does not say {name}: {getattr(settings, name)} is assumed,"
            " state-spaces' default"
            for name in config.get("assumed", ())
        ),
        step=step,
    )
