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
from fuseport.exporter.errors import CorruptInput, UsageError
from fuseport.exporter.models._attention import Attention, AttentionConfig, FeedForward
from fuseport.exporter.models._stepping import PAST, PAST_SIZE
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


_OF_MLPS = ("d_intermediate", "d_mlp")  # 0 where there is none


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """What these models differ in, whatever their mixers are.

    Attributes:
        d_model: width of the residual stream.
        n_layer: blocks, each with one scan, or with attention.
        vocab_size: rows of the embedding, padding included.
        norm_epsilon: of every norm of the residual stream.
        rms_norm: RMSNorm; LayerNorm otherwise.
        residual_in_fp32: the residual stream is float32 at least, whatever the weights' dtype.
        tie_embeddings: the head's weight is the embedding's.
        conv_bias: the causal filter has a bias.
        proj_bias: in_proj and out_proj of a scan have one.
        attention: the layers that have attention, and no scan; None if none has.
        d_intermediate: hidden width of a gated MLP after each layer; 0 for none.

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
    attention: AttentionConfig | None = None
    d_intermediate: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.attention, Mapping):  # as JSON data
            object.__setattr__(self, "attention", _made(AttentionConfig, self.attention))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float, bool) and type(value) is not field.type:
                raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
            least = 0 if field.name in _OF_MLPS else 1
            if field.type is int and value < least:
                raise ValueError(f"{field.name} is {value}, expected {least} or more")
            if field.name.endswith("epsilon") and not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}, expected a positive number")


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
        """Logits, (b, 1, vocab_size), and the states after the token.

        Args:
            input_ids: (b, 1) int64.
            states: by `STATES`, (scans, b, …) each: of all layers that scan, in their order; then
                of each layer of attention, as its `state_dims` says.
        """
        hidden, *new = self.backbone.step(input_ids, *states)
        return self.lm_head(cast(hidden, self.lm_head.weight.dtype)), *new

    def state_specs(self) -> tuple[TensorSpec, ...]:
        """Of the states, with the dtypes that the weights have by now."""
        mixers = self.backbone.mixers()
        scans = [mixer for mixer in mixers if not isinstance(mixer, Attention)]
        dtype = scans[0].in_proj.weight.dtype
        dtypes = {False: _name(dtype), True: _name(_wider(dtype))}
        of_scans = [
            TensorSpec(name, dtypes[is_wide], (len(scans), "batch", *shape))
            for (name, is_wide), shape in zip(self.STATES, scans[0].state_shapes(), strict=True)
        ]
        attending = [(i, m) for i, m in enumerate(mixers) if isinstance(m, Attention)]
        return *of_scans, *(
            TensorSpec(f"{name}_{i}", dtypes[False], dims)
            for i, mixer in attending
            for name, dims in mixer.state_dims().items()
        )


class FilteredDecoder(Decoder):
    """Of layers with a causal filter before the scan."""

    STATES = (("conv_states", False), ("ssm_states", True))

    def forward(
        self, input_ids: Tensor, conv_states: Tensor, ssm_states: Tensor, *attended: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits of the token after this one, and the states after it.

        Args:
            input_ids: (b, 1) int64.
            conv_states: (scans, b, channels, W-1), in the activations' dtype: the inputs of each
                layer's filter before this token, the last one last; zeros before the first token.
            ssm_states: (scans, b, …), float32 at least; zeros before the first token.
            attended: of each layer of attention, the inputs of its filter, if it has one, and the
                keys and values before this token, (b, K, past, P) each.

        Returns:
            logits (b, 1, vocab_size), and the states.
        """
        return self.stepped(input_ids, conv_states, ssm_states, *attended)


class _Backbone(nn.Module):
    def __init__(self, config: LanguageModelConfig, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(
            _Block(config, _mixer(config, number, mixer)) for number in range(config.n_layer)
        )
        self.norm_f = _Norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        residual = self._embedded(input_ids)
        for layer in self.layers:
            residual = layer(residual)
        normed: Tensor = self.norm_f(residual)
        return normed

    def step(self, input_ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        residual = self._embedded(input_ids)
        blocks = self._blocks()
        own = sum(len(m.state_dims()) for m in self.mixers() if isinstance(m, Attention))
        stacked, attended = states[: len(states) - own], iter(states[len(states) - own :])
        scanned: list[list[Tensor]] = []
        new_attended: list[Tensor] = []
        for block in blocks:
            if isinstance(block.mixer, Attention):
                given = [next(attended) for _ in block.mixer.state_dims()]
                residual, *new = block.step(residual, *given)
                new_attended += new
            else:
                residual, *new = block.step(residual, *(state[len(scanned)] for state in stacked))
                scanned.append(new)
        new_stacked = map(torch.stack, zip(*scanned, strict=True))
        return self.norm_f(residual), *new_stacked, *new_attended

    def mixers(self) -> "list[Mixer | Attention]":
        return [block.mixer for block in self._blocks()]

    def _blocks(self) -> "list[_Block]":
        return [block for block in self.layers if isinstance(block, _Block)]

    def _embedded(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids)
        return wide(embedded) if self.residual_in_fp32 else embedded


def _mixer(
    config: LanguageModelConfig, number: int, mixer: Callable[[], Mixer]
) -> "Mixer | Attention":
    if config.attention is not None and number in config.attention.layers:
        return Attention(config.attention, config.d_model)
    return mixer()


class _Block(nn.Module):
    """Adds to the residual stream what its mixer makes of it, and then what its MLP does."""

    def __init__(self, config: LanguageModelConfig, mixer: "Mixer | Attention") -> None:
        super().__init__()
        self.norm = _Norm(config)
        self.mixer = mixer
        if config.d_intermediate:
            self.norm2 = _Norm(config)
            self.mlp = FeedForward(config.d_model, config.d_intermediate)
        self.has_mlp = config.d_intermediate > 0

    def forward(self, residual: Tensor) -> Tensor:
        return self._fed(residual + self.mixer(self._normed(residual)))

    def step(self, residual: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        added, *new = self.mixer.step(self._normed(residual), *states)
        return self._fed(residual + added), *new

    def _normed(self, residual: Tensor) -> Tensor:
        return cast(self.norm(residual), self.mixer.in_proj.weight.dtype)

    def _fed(self, residual: Tensor) -> Tensor:
        if not self.has_mlp:
            return residual
        added: Tensor = self.mlp(cast(self.norm2(residual), self.mlp.fc1.weight.dtype))
        return residual + added


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
_Kind = TypeVar("_Kind")


def parsed(kind: type[_Config], config: Mapping[str, Any], architecture: str) -> _Config:
    """A configuration from JSON data, other keys left aside.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    # Manifests of before there were hybrids have no word about them.
    known = {"attention": None, "d_intermediate": 0, **config}
    try:
        return _made(kind, known)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptInput(
            f"a {architecture} configuration: {show(error)}; export the model again"
        ) from error


def _made(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """A dataclass of its fields' values, others left aside."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]  # a dataclass


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

    attention = settings.attention
    scans = settings.n_layer - (len(attention.layers) if attention else 0)

    def step() -> Model:
        if attention and not attention.heads.causal:
            raise UsageError("program step: attention that looks ahead cannot decode by tokens")
        stepping = decoder(module)
        token = TensorSpec("input_ids", "int64", ("batch", 1), settings.vocab_size)
        states = stepping.state_specs()
        return Model(
            module=stepping.eval(),
            architecture=architecture,
            config=config,
            inputs=(token, *states),
            sizes={"batch": 2, **({PAST: PAST_SIZE} if attention else {})},
            outputs=("logits", *(f"new_{state.name}" for state in states)),
            scans=scans,
            differentiable=False,
        )

    return Model(
        module=module,
        architecture=architecture,
        config=dict(config),
        inputs=(ids,),
        sizes={"batch": 2, "length": 16},
        outputs=("logits",),
        scans=scans,
        keeps_float32=keeps_float32,
        renamed=renamed,
        notes=tuple(
            f"the checkpoint does not say {name}: {getattr(settings, name)} is assumed,"
            " state-spaces' default"
            for name in config.get("assumed", ())
        ),
        step=step,
    )
