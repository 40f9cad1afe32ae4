"""Rotary position embeddings, over the registered op."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fuseport.exporter.shims._rotary import apply_rotary

from .._refused import refuse_parallel

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]


class RotaryPositionEmbedding(nn.Module):
    """Angles of positions.

    Args:
        dim: channels of a head.
        rotary_percent: the part of these that is turned, up to 1.
        seq_len_interpolation_factor: what positions are divided by, with the next; None for 1.
        pretrained_max_position_embeddings: m. Where there are more positions than that many times
            the factor, they are divided by their number over m.
        rotary_base: of the frequencies.
        interleaved: whether the channels of a pair are neighbours.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        part = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**part)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of so many positions from `offset` on, (max_seq_len, 1, 1, dim), each twice."""
        inv_freq = self.inv_freq
        position = torch.arange(max_seq_len, device=inv_freq.device, dtype=inv_freq.dtype) + offset
        most, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if most is not None and factor is not None:
            position = position / (max_seq_len / most if max_seq_len > most * factor else factor)
        angles = position[:, None] * inv_freq
        if self.interleaved:
            twice = angles.repeat_interleave(2, -1)
        else:
            twice = torch.cat([angles, angles], -1)
        return twice[:, None, None]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Pairs of the first channels, turned; computed in float32 at least, and rounded once.

    Args:
        t: (s, b, h, d), (b, s, h, d) or (t, h, d), by the format.
        freqs: (m, 1, 1, r) or (m, b, 1, r) of angles, m not below s, r not above d; each angle
            twice, as `RotaryPositionEmbedding` has them.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: (b,), integers, which position is the first; None for 0.
        interleaved: whether the channels of a pair are neighbours; else one is of each half.
        fused: else sines and cosines are rounded to t's dtype.
        cu_seqlens: (b + 1,), for "thd", where sequences begin, and the end of the last.
        cp_size: must be 1.
        cp_rank: has no effect.

    Returns:
        t's shape and dtype.

    Raises:
        NotImplementedError: cp_size is above 1.
        ValueError: the format is another one, or the angles of a pair differ.
    """
    refuse_parallel("apply_rotary_pos_emb", None, cp_size)
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"tensor_format is {tensor_format!r}; it is sbhd, bshd or thd")
    if (cu_seqlens is None) == (tensor_format == "thd"):
        cu_seqlens = None
        if tensor_format == "thd":
            raise ValueError("cu_seqlens is needed for thd")
    angles = _once(freqs, interleaved)[:, :, 0].transpose(0, 1)
    angles = angles[0] if angles.shape[0] == 1 else angles
    cos, sin = angles.cos(), angles.sin()
    if not fused:
        cos, sin = cos.to(t.dtype), sin.to(t.dtype)
    first: Any = 0 if start_positions is None else start_positions
    by_batch = t.transpose(0, 1) if tensor_format == "sbhd" else t
    out = apply_rotary(by_batch, cos, sin, first, cu_seqlens, interleaved=interleaved)
    return out.transpose(0, 1) if tensor_format == "sbhd" else out


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`apply_rotary_pos_emb` of the first two of three tensors that are one in the last dimension.

    Args:
        qkv: (s, b, h, n) or (b, s, h, n), by the format.
        q_freqs: of the first, as there.
        k_freqs: of the second.
        qkv_split_arg_list: how many of the n channels are of each.

    Returns:
        The three, each with its channels divided among as many heads as have the width of the
        last: (…, h·(its channels) / d, d).
    """
    width = qkv_split_arg_list[2]
    heads = [part.unflatten(-1, (-1, width)) for part in qkv.split([*qkv_split_arg_list], -1)]
    q, k, v = (part.flatten(2, 3) for part in heads)
    options = (tensor_format, start_positions, interleaved, True, None, cp_size, cp_rank)
    q, k = apply_rotary_pos_emb(q, q_freqs, *options), apply_rotary_pos_emb(k, k_freqs, *options)
    return q, k, v


def _once(freqs: Tensor, interleaved: bool) -> Tensor:
    """Each angle once, float32 or float64."""
    if interleaved:
        angles, others = freqs[..., ::2], freqs[..., 1::2]
    else:
        angles, others = freqs.chunk(2, -1)
    has_values = not isinstance(freqs, FakeTensor) and not torch.compiler.is_exporting()
    if has_values and not torch.equal(angles, others):
        raise ValueError("apply_rotary_pos_emb: the two angles of a pair of channels differ")
    return angles if angles.dtype == torch.float64 else angles.float()
