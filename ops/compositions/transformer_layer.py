"""A decoder layer of the Llama type for fine-tuning: seven projections frozen in NF4, with LoRA.

Source: Touvron et al., "LLaMA: Open and efficient foundation language models", 2023, with the
grouped-query attention of Ainslie et al., 2023; Dettmers et al., "QLoRA", 2023, for what is frozen
and what is trained.
"""

import math
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.nf4_linear import dequantize_4bit, nf4_linear, quantize_4bit
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rotary_embedding import rotary_embedding
from fuseport.ops.swiglu import swiglu

__all__ = ["PROJECTIONS", "Nf4LoraLinear", "TransformerLayer"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a layer, by the names that checkpoints have for them."""


class Nf4LoraLinear(nn.Module):
    """x·Wᵀ + bias + (alpha/rank)·(x·Aᵀ)·Bᵀ: W, in NF4, and bias are frozen, A and B are trained.

    A begins as the weight of an `nn.Linear` does, and B as zeros.

    Args:
        weight: W, (out, in), floating: it is quantised.
        bias: (out,), or None.
        rank: of A (rank, in) and B (out, rank).
        alpha: scales LoRA's part.
        block_size: of W's storage, a power of two from 16 up.

    Raises:
        ValueError: W cannot be quantised so.
    """

    packed: Tensor
    absmax: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        rank: int = 8,
        alpha: float = 16.0,
        block_size: int = 64,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.block_size, self.scaling = block_size, alpha / rank
        packed, absmax = quantize_4bit(weight, block_size)
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", absmax)
        frozen = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", frozen)
        self.lora_A = nn.Parameter(weight.new_empty(rank, self.in_features))
        self.lora_B = nn.Parameter(weight.new_zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        adapters = (self.lora_A, self.lora_B, self.scaling)
        frozen = (self.packed, self.absmax, self.out_features, self.bias)
        return nf4_linear(x, *frozen, *adapters, self.block_size)

    def weight(self) -> Tensor:
        """W as the layer computes with it, LoRA's part not included, in absmax's dtype."""
        shape = (self.out_features, self.in_features)
        return dequantize_4bit(self.packed, self.absmax, shape, self.block_size)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As `nn.Module` has it, but absmax is never rounded: halves are computed in float32."""
        before = self.absmax
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of torch's
        if self.absmax.dtype in (torch.float16, torch.bfloat16):
            self.absmax = before.to(self.absmax.device)
        return self


class TransformerLayer(nn.Module):
    """A causal decoder layer: h = x + attention(norm(x)), then h + mlp(norm(h)); positions from 0.

    Its weights begin as those of `nn.Linear` do; `from_linear` takes those of a model.

    Args:
        hidden_size: channels.
        intermediate_size: of the SwiGLU in between.
        heads: of queries.
        key_value_heads: a divisor of `heads`; None for as many.
        head_size: even; None for hidden_size/heads.
        rank: of the LoRA adapters of all projections.
        alpha: scales them.
        block_size: of the NF4 weights.
        eps: of the norms.
        rope_theta: of the rotary positions.

    Raises:
        ValueError: sizes do not fit each other.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        heads: int,
        key_value_heads: int | None = None,
        head_size: int | None = None,
        rank: int = 8,
        alpha: float = 16.0,
        block_size: int = 64,
        eps: float = 1e-6,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.heads, self.key_value_heads = heads, key_value_heads or heads
        self.head_size = head_size or hidden_size // heads
        self.eps, self.rope_theta = eps, rope_theta
        if heads % self.key_value_heads:
            raise ValueError(f"key_value_heads must divide {heads}; got {self.key_value_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size must be even; got {self.head_size}")

        def linear(inputs: int, outputs: int) -> Nf4LoraLinear:
            made = nn.Linear(inputs, outputs, bias=False)
            return Nf4LoraLinear(made.weight, None, rank, alpha, block_size)

        queries = heads * self.head_size
        keys = self.key_value_heads * self.head_size
        self.q_proj = linear(hidden_size, queries)
        self.k_proj = linear(hidden_size, keys)
        self.v_proj = linear(hidden_size, keys)
        self.o_proj = linear(queries, hidden_size)
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)
        self.input_layernorm = nn.Parameter(torch.ones(hidden_size))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden_size))

    @classmethod
    def from_linear(
        cls,
        layers: Mapping[str, nn.Linear],
        input_layernorm: Tensor,
        post_attention_layernorm: Tensor,
        heads: int,
        key_value_heads: int | None = None,
        rank: int = 8,
        alpha: float = 16.0,
        block_size: int = 64,
        eps: float = 1e-6,
        rope_theta: float = 10000.0,
    ) -> Self:
        """A layer of given weights, which are quantised.

        Args:
            layers: those of `PROJECTIONS`, by name; biases stay as they are, frozen.
            input_layernorm: (hidden_size,), the weight of the norm before attention; copied.
            post_attention_layernorm: (hidden_size,), that before the SwiGLU; copied.
            heads: as in the constructor, like all others; sizes are those of the weights.

        Raises:
            KeyError: a layer is missing.
            ValueError: sizes do not fit each other.
        """
        query, gate = layers["q_proj"].weight, layers["gate_proj"].weight
        sizes = (query.shape[1], len(gate), heads, key_value_heads, len(query) // heads)
        made = cls(*sizes, rank, alpha, block_size, eps, rope_theta)
        for name, expected in made.projections().items():
            given = layers[name]
            shape = (expected.out_features, expected.in_features)
            if tuple(given.weight.shape) != shape:
                raise ValueError(f"{name} must be {shape}; got {tuple(given.weight.shape)}")
            own = Nf4LoraLinear(given.weight, given.bias, rank, alpha, block_size)
            setattr(made, name, own)
        made.input_layernorm = nn.Parameter(input_layernorm.detach().clone())
        made.post_attention_layernorm = nn.Parameter(post_attention_layernorm.detach().clone())
        return made

    def projections(self) -> dict[str, Nf4LoraLinear]:
        """Those of `PROJECTIONS`, by name."""
        found = {name: module for name, module in self.named_children() if name in PROJECTIONS}
        return cast(dict[str, Nf4LoraLinear], found)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, length, hidden_size) → the same."""
        x = hidden_states
        x = x + self._attention(rms_norm(x, self.input_layernorm, self.eps))
        return x + self._mlp(rms_norm(x, self.post_attention_layernorm, self.eps))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(t: Tensor, heads: int) -> Tensor:
            return t.reshape(batch, length, heads, self.head_size).transpose(1, 2)

        cos, sin = self._rotation(x)
        query = rotary_embedding(split(self.q_proj(x), self.heads), cos, sin)
        key = rotary_embedding(split(self.k_proj(x), self.key_value_heads), cos, sin)
        value = split(self.v_proj(x), self.key_value_heads)
        mixed = F.scaled_dot_product_attention(
            query, self._shared(key), self._shared(value), is_causal=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _shared(self, t: Tensor) -> Tensor:
        """A head of keys or values for each of the queries' that share it."""
        batch, heads, length, size = t.shape
        group = self.heads // heads
        if group == 1:
            return t
        shared = t.unsqueeze(2).expand(batch, heads, group, length, size)
        return shared.reshape(batch, self.heads, length, size)

    def _rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, (length, head_size/2), in float32 at least."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        pair = torch.arange(0, self.head_size, 2, dtype=wide, device=x.device)
        frequency = self.rope_theta ** (-pair / self.head_size)
        position = torch.arange(x.shape[1], dtype=wide, device=x.device)
        angle = position[:, None] * frequency
        return angle.cos(), angle.sin()

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out
