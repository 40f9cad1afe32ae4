"""Language models of Mamba layers, with the names and parameters of state-spaces/mamba."""

import math
from collections import namedtuple
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.block import Block
from ..modules.mamba2 import Mamba2
from ..modules.mamba3 import Mamba3
from ..modules.mamba_simple import Mamba
from ..modules.mha import MHA
from ..modules.mlp import GatedMLP
from ..ops.triton.layer_norm import RMSNorm, layer_norm_fn
from ..utils.generation import GenerationMixin
from ..utils.hf import load_config_hf, load_state_dict_hf
from .config_mamba import MambaConfig

__all__ = ["MambaLMHeadModel", "MixerModel", "create_block"]

CausalLMOutput = namedtuple("CausalLMOutput", ["logits"])

_LAYERS: dict[str, Any] = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3}


def create_block(
    d_model: int,
    d_intermediate: int = 0,
    ssm_cfg: dict[str, Any] | None = None,
    attn_layer_idx: list[int] | None = None,
    attn_cfg: dict[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """One block; arguments as of `MambaConfig`.

    Raises:
        ValueError: `ssm_cfg` names another layer than Mamba1, Mamba2 or Mamba3.
    """
    options = dict(ssm_cfg or {})
    name = options.pop("layer", "Mamba1")
    if name not in _LAYERS:
        raise ValueError(f"ssm_cfg: layer is {name!r}; it must be Mamba1, Mamba2 or Mamba3")
    layer = _LAYERS[name]
    if layer_idx in (attn_layer_idx or ()):
        layer, options = MHA, dict(attn_cfg or {})
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    mlp: Any = nn.Identity
    if d_intermediate:
        mlp = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **factory)
    block = Block(
        d_model,
        partial(layer, layer_idx=layer_idx, **options, **factory),
        mlp,
        partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **factory),
        fused_add_norm,
        residual_in_fp32,
    )
    block.layer_idx = layer_idx  # type: ignore[assignment]  # nn.Module's attributes are tensors
    return block


def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """GPT-2's initial values: what adds to the residual stream is scaled by 1/√(layers)."""
    if isinstance(module, nn.Linear):
        if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if not rescale_prenorm_residual:
        return
    for name, parameter in module.named_parameters():
        if name in ("out_proj.weight", "fc2.weight"):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            with torch.no_grad():
                parameter.div_(math.sqrt(n_residuals_per_layer * n_layer))


class MixerModel(nn.Module):
    """Embedding, blocks and a last norm; arguments as of `MambaConfig`."""

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int,
        vocab_size: int,
        ssm_cfg: dict[str, Any] | None = None,
        attn_layer_idx: list[int] | None = None,
        attn_cfg: dict[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.embedding = nn.Embedding(vocab_size, d_model, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            create_block(
                d_model,
                d_intermediate,
                ssm_cfg,
                attn_layer_idx,
                attn_cfg,
                norm_epsilon,
                rms_norm,
                residual_in_fp32,
                fused_add_norm,
                index,
                device,
                dtype,
            )
            for index in range(n_layer)
        )
        norm: Any = RMSNorm if rms_norm else nn.LayerNorm
        self.norm_f = norm(d_model, eps=norm_epsilon, device=device, dtype=dtype)
        self.apply(
            partial(
                _init_weights,
                n_layer=n_layer,
                n_residuals_per_layer=2 if d_intermediate else 1,
                **(initializer_cfg or {}),
            )
        )

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Zero states of each layer, by its index."""
        return {
            i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)  # type: ignore[operator]  # blocks
            for i, layer in enumerate(self.layers)
        }

    def forward(
        self, input_ids: Tensor, inference_params: Any = None, **mixer_kwargs: Any
    ) -> Tensor:
        """(b, l) int64 → (b, l, d_model)."""
        hidden_states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(
                hidden_states, residual, inference_params=inference_params, **mixer_kwargs
            )
        if self.fused_add_norm:
            out: Tensor = layer_norm_fn(
                hidden_states,
                self.norm_f.weight,
                self.norm_f.bias,
                residual,
                eps=self.norm_f.eps,
                residual_in_fp32=self.residual_in_fp32,
                is_rms_norm=isinstance(self.norm_f, RMSNorm),
            )
            return out
        total = hidden_states if residual is None else hidden_states + residual
        normed: Tensor = self.norm_f(total.to(self.norm_f.weight.dtype))
        return normed


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """A language model.

    Args:
        config: its configuration.
        initializer_cfg: arguments of `_init_weights`.
    """

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        multiple = config.pad_vocab_size_multiple
        vocab_size = -(-config.vocab_size // multiple) * multiple
        self.backbone = MixerModel(
            config.d_model,
            config.n_layer,
            config.d_intermediate,
            vocab_size,
            config.ssm_cfg,
            config.attn_layer_idx,
            config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            device=device,
            dtype=dtype,
        )
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False, device=device, dtype=dtype)
        self.apply(partial(_init_weights, n_layer=config.n_layer, **(initializer_cfg or {})))
        self.tie_weights()

    def tie_weights(self) -> None:
        """The head's weight becomes the embedding's, where the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Zero states of each layer, by its index."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> Any:
        """(b, l) int64 → a tuple with `logits`, (b, l, vocabulary); of the last tokens if asked."""
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden_states = hidden_states[:, -num_last_tokens:]
        return CausalLMOutput(logits=self.lm_head(hidden_states))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name: str, device: Any = None, dtype: Any = None, **kwargs: Any
    ) -> "MambaLMHeadModel":
        """Raises RuntimeError: stand-ins load nothing from a hub; see `utils.hf`."""
        config = MambaConfig(**load_config_hf(pretrained_model_name))
        model = cls(config, device=device, dtype=dtype, **kwargs)
        model.load_state_dict(load_state_dict_hf(pretrained_model_name, device, dtype))
        return model
