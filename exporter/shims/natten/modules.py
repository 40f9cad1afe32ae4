"""Layers with the linear ones before and after attention."""

from collections.abc import Collection
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._arguments import check_lengths, check_odd, read_layer
from ._attention import attend, scores_of, weighted

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class _NeighborhoodAttention(nn.Module):
    """Arguments are those of any version; by their place, where versions agree on what they mean.

    Before 0.17 a layer has biases of relative places, `rpb`, unless told otherwise, and since then
    has none. Where it is told nothing, weights decide that it is to have: see `fuseport_settle`.

    Args:
        dim: channels; `embed_dim` since 0.20.
        num_heads: heads, which divide them.
        kernel_size: keys of a window; one for all dimensions, or one of each.
        stride: since 0.20, of how many queries the windows are one.
        dilation: how far apart keys of a window are.
        is_causal: since 0.17, whether a query sees no key after it.
        bias: before 0.17, whether there is `rpb`; then, inputs smaller than windows are padded.
        rel_pos_bias: in 0.17, whether there is `rpb`.
        qkv_bias: whether the first linear layer has a bias.
        qk_scale: of the scores; None for 1/√(dim / num_heads).
        attn_drop: dropout of weights.
        proj_drop: dropout of what is returned.
    """

    rank: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        layer = read_layer(f"NeighborhoodAttention{self.rank}D", self.rank, args, kwargs)
        self.embed_dim, self.num_heads = layer.dim, layer.num_heads
        self.head_dim = layer.dim // layer.num_heads
        self.scale = layer.qk_scale or self.head_dim**-0.5
        self.axes = layer.axes
        self.kernel_size = tuple(axis.kernel for axis in self.axes)
        self.stride = tuple(axis.stride for axis in self.axes)
        self.dilation = tuple(axis.dilation for axis in self.axes)
        self.is_causal = tuple(axis.causal for axis in self.axes)
        self.pads = bool(layer.pads)
        self.is_settled = layer.has_bias is not None
        self.qkv = nn.Linear(layer.dim, layer.dim * 3, bias=layer.qkv_bias)
        self.rpb: nn.Parameter | None
        self.register_parameter("rpb", None)
        if layer.has_bias:
            self._have_bias()
        self.attn_drop = nn.Dropout(layer.attn_drop)
        self.proj = nn.Linear(layer.dim, layer.dim)
        self.proj_drop = nn.Dropout(layer.proj_drop)

    def fuseport_settle(self, names: Collection[str]) -> None:
        """Have `rpb`, and be a layer of before 0.17, if it is among the names of this layer's
        weights, where the code that made the layer does not say."""
        if not self.is_settled and "rpb" in names:
            self._have_bias()
            self.pads = True
        self.is_settled = True

    def forward(self, x: Tensor) -> Tensor:
        """(b, L…, dim) → the same."""
        if x.dim() != self.rank + 2:
            raise ValueError(
                f"natten: a layer of {self.rank} dimensions takes a tensor of {self.rank + 2}, "
                f"and it is {tuple(x.shape)}"
            )
        lengths = x.shape[1:-1]
        if self.pads:
            x = self._padded(x)
        check_lengths(x.shape[1:-1], self.axes)
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = heads.unbind(-3)
        if self.training and self.attn_drop.p > 0.0:
            out = self._dropped(q, k, v)
        else:
            out, _ = attend(q, k, v, self.axes, self.scale, self.rpb)
        out = out.to(x.dtype).flatten(-2)
        for i, length in enumerate(lengths):
            out = out.narrow(1 + i, 0, length)
        proj: Tensor = self.proj_drop(self.proj(out))
        return proj

    def extra_repr(self) -> str:
        """As natten's."""
        return (
            f"head_dim={self.head_dim}, num_heads={self.num_heads}, kernel_size={self.kernel_size},"
            f" stride={self.stride}, dilation={self.dilation}, is_causal={self.is_causal}, "
            f"has_bias={self.rpb is not None}"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if not self.is_settled and f"{prefix}rpb" in state_dict:
            self.fuseport_settle(["rpb"])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _have_bias(self) -> None:
        if any(self.is_causal):
            raise NotImplementedError("natten has no biases of relative places where it is causal")
        check_odd(self.axes, "biases of relative places")
        weight = self.qkv.weight
        sizes = (2 * kernel - 1 for kernel in self.kernel_size)
        bias = torch.zeros(self.num_heads, *sizes, dtype=weight.dtype, device=weight.device)
        self.rpb = nn.Parameter(nn.init.trunc_normal_(bias, std=0.02))

    def _padded(self, x: Tensor) -> Tensor:
        """Zeros behind what is smaller than a window."""
        for i, axis in enumerate(self.axes):
            window = axis.kernel * axis.dilation
            if x.shape[1 + i] < window:
                x = F.pad(x, (0, 0) * (self.rank - i) + (0, window - x.shape[1 + i]))
        return x

    def _dropped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With dropout of the weights, which are of odd kernels then."""
        check_odd(self.axes, "dropout of weights")
        q, k, v = (t.movedim(-2, 1) for t in (q, k, v))
        scores = scores_of(q * self.scale, k, self.axes, self.rpb)
        return weighted(self.attn_drop(scores.softmax(-1)), v, self.axes).movedim(1, -2)


class NeighborhoodAttention1D(_NeighborhoodAttention):
    """Of (b, l, dim)."""

    rank = 1


class NeighborhoodAttention2D(_NeighborhoodAttention):
    """Of (b, x, y, dim)."""

    rank = 2


class NeighborhoodAttention3D(_NeighborhoodAttention):
    """Of (b, x, y, z, dim)."""

    rank = 3
