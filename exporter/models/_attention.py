"""Layers of attention among those that scan, and feed-forward layers after both.

Architecture and parameter names are those of github.com/state-spaces/mamba (`attn_layer_idx`,
`attn_cfg`, `d_intermediate`); the code is our own. b batch, l length, H heads of queries, K of keys
and values, P channels to a head, W the causal filter's width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.models._decoding import filtered
from fuseport.exporter.models._stepping import PAST
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.compositions.rotary_attention import Heads, rotary_attention
from fuseport.ops.swiglu import swiglu

__all__ = ["Attention", "AttentionConfig", "FeedForward"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What the layers of attention of a model are.

    Attributes:
        layers: their numbers, from 0 up.
        heads: of queries, and of keys and values.
        d_mlp: channels of the gated MLP beside the heads, gates included; even, 0 for none.
        d_conv: W; 0 for no filter.
        qkv_bias: whether in_proj has a bias.
        out_bias: whether out_proj has one.

    Raises:
        ValueError: a value is of another type, or makes no sense.
    """

    layers: tuple[int, ...]
    heads: Heads
    d_mlp: int = 0
    d_conv: int = 0
    qkv_bias: bool = True
    out_bias: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if isinstance(self.heads, Mapping):  # as JSON data
            object.__setattr__(self, "heads", Heads(**self.heads))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, bool) and type(value) is not field.type:
                raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
        if self.d_mlp < 0 or self.d_mlp % 2 or self.d_conv < 0:
            raise ValueError(f"d_mlp is {self.d_mlp}, d_conv is {self.d_conv}")


class Attention(nn.Module):
    """The mixer of a layer of attention: a causal filter before it, a gated MLP beside it."""

    def __init__(self, config: AttentionConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.heads = config.heads
        qkv = self.heads.channels
        self.in_proj = nn.Linear(d_model, qkv + config.d_mlp, bias=config.qkv_bias)
        if config.d_conv:
            self.conv1d = nn.Conv1d(qkv, qkv, config.d_conv, groups=qkv)
        given = self.heads.queries * self.heads.width + config.d_mlp // 2
        self.out_proj = nn.Linear(given, d_model, bias=config.out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(b, l, d_model) → (b, l, d_model)."""
        qkv, beside = self._projected(x)
        if self.config.d_conv:
            qkv = causal_conv1d(qkv.mT, self.conv1d.weight.squeeze(1), self.conv1d.bias).mT
        y, _, _ = rotary_attention(qkv, self.heads)
        return self._joined(y, beside)

    def step(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One token, (b, 1, d_model), and states as in `state_dims` → the same after it."""
        *last, keys, values = states
        qkv, beside = self._projected(x)
        if self.config.d_conv:
            row, *last = filtered(qkv.squeeze(1), last[0], self.conv1d, activated=False)
            qkv = row.unsqueeze(1)
        y, keys, values = rotary_attention(qkv, self.heads, (keys, values))
        return self._joined(y, beside), *last, keys, values

    def state_dims(self) -> dict[str, tuple[int | str, ...]]:
        """By names: the filter's last inputs, (b, P·(H + 2K), W-1), if there is one; keys and
        values, (b, K, past, P)."""
        heads, width = self.heads, self.config.d_conv
        kept = ("batch", heads.keys, PAST, heads.width)
        last = {"filter": ("batch", heads.channels, width - 1)}
        return (last if width else {}) | {"key": kept, "value": kept}

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        projected: Tensor = self.in_proj(x)
        if not self.config.d_mlp:
            return projected, None
        qkv, up, gate = projected.split(
            [self.heads.channels, self.config.d_mlp // 2, self.config.d_mlp // 2], -1
        )
        return qkv, up * F.silu(gate)

    def _joined(self, y: Tensor, beside: Tensor | None) -> Tensor:
        joined: Tensor = self.out_proj(y if beside is None else torch.cat([y, beside], -1))
        return joined


class FeedForward(nn.Module):
    """fc2(y·SiLU(gate)), where y and gate are the halves of fc1(x)."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_model) → (…, d_model)."""
        y, gate = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(swiglu(gate, y))
        return out
