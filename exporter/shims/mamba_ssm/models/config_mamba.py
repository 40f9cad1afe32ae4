"""The configuration of a language model, as `config.json` has it."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["MambaConfig"]


@dataclass
class MambaConfig:
    """What language models differ in; `ssm_cfg` holds arguments of the layers.

    Attributes:
        d_model: width of the residual stream.
        d_intermediate: of an MLP after each layer; 0 for none.
        n_layer: blocks.
        vocab_size: before it is padded.
        ssm_cfg: arguments of layers; `layer` in it is Mamba1, Mamba2 or Mamba3.
        attn_layer_idx: blocks whose layer is `MHA`.
        attn_cfg: arguments of these.
        rms_norm: RMS norms, not layer norms.
        residual_in_fp32: the residual stream is float32.
        fused_add_norm: addition and norm are one function.
        pad_vocab_size_multiple: what the vocabulary is padded to.
        tie_embeddings: the head's weight is the embedding's.
    """

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
