"""The stand-in for Transformer Engine: attention and rotary embeddings by definitions."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.test_shims_transformer_engine import drawn, same
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention import rope

CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
MASKS = ("no_mask", "padding", "arbitrary", *CAUSAL)


def heads_last(x: Tensor, order: str) -> Tensor:
    """(b, s, h, d) as `order` has it, and back."""
    return x.transpose(0, 1) if order == "sbhd" else x


def sees(i: int, j: int, lengths: tuple[int, int], kind: str, window: Any, from_end: bool) -> bool:
    """Whether the query at place i sees the key at place j, by the package's documentation.

    Args:
        lengths: of queries and keys, without padding.
        from_end: what bottom_right_diagonal is for masks that do not say it.
    """
    if kind.startswith("padding") and (i >= lengths[0] or j >= lengths[1]):
        return False
    back, ahead = window or (-1, -1)
    if "causal" in kind:
        ahead, from_end = 0, "bottom_right" in kind
    place = i + (lengths[1] - lengths[0] if from_end else 0)
    return (back < 0 or j >= place - back) and (ahead < 0 or j <= place + ahead)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, **how: Any) -> Tensor:
    """(b, s, h, d) to (b, t, g, d), a query and a head at a time: (b, s, h·e).

    Args:
        seen: (b, s, t), or (b, h, s, t).
        how: scale; bias, (b, h, s, t), and whether it is scaled; sink, (h,); full, whether a query
            that sees nothing has the mean of all values, and not zeros.
    """
    rows = []
    for b, i, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        g = h * k.shape[2] // q.shape[2]
        kept = (seen[b, h, i] if seen.dim() == 4 else seen[b, i]).nonzero().flatten()
        if not len(kept) and how.get("full"):
            rows.append(v[b, :, g].mean(0))
            continue
        bias = how["bias"][b, h, i, kept] if "bias" in how else 0.0
        scores = k[b, kept, g] @ q[b, i, h]
        scale = how.get("scale", 1 / math.sqrt(q.shape[3]))
        scores = (scores + bias) * scale if how.get("scaled") else scores * scale + bias
        weights = torch.exp(scores)
        total = weights.sum() + (torch.exp(how["sink"][h]) if "sink" in how else 0.0)
        rows.append(weights / total @ v[b, kept, g])
    return torch.stack(rows).view(*q.shape[:2], -1)


def qkv(s: int, t: int, b: int = 2, h: int = 4, g: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = rand(b, s, h, 3), rand(b, t, g, 3), rand(b, t, g, 3)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def padding(lengths: list[int], of: int) -> Tensor:
    return (torch.arange(of) >= torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("from_end", [None, False])
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_by_the_documentation(kind: str, window: Any, from_end: Any, order: str) -> None:
    s, t, of_q, of_k = 4, 6, [3, 4], [6, 2]
    q, k, v = qkv(s, t)
    layer = te.DotProductAttention(
        4, 3, 2, qkv_format=order, attn_mask_type=kind, attention_type="cross"
    )
    lengths = [*zip(of_q, of_k, strict=True)] if "padding" in kind else [(s, t)] * 2
    mask: Any = (padding(of_q, s), padding(of_k, t)) if "padding" in kind else None
    window = window and (2, 0) if "causal" in kind else window
    seen = torch.tensor(
        [
            [[sees(i, j, n, kind, window, from_end is None) for j in range(t)] for i in range(s)]
            for n in lengths
        ]
    )
    if kind == "arbitrary":
        mask = torch.rand(2, 4, s, t) > 0.6
        mask[0, 1, 2] = True
        seen = seen[:, None] & ~mask
    assert not seen.any(-1).all() or kind in ("no_mask", "causal", "causal_bottom_right")
    expected = attention(q, k, v, seen, full=kind == "arbitrary")
    own = [heads_last(x, order) for x in (q, k, v)]
    out = layer(*own, mask, window_size=window, bottom_right_diagonal=from_end)
    same(heads_last(out, order), expected, [q, k, v])
    if "padding" in kind:
        starts = [torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (of_q, of_k)]
        out = layer(
            *own,
            cu_seqlens_q=starts[0],
            cu_seqlens_kv=starts[1],
            window_size=window,
            bottom_right_diagonal=from_end,
        )
        close(heads_last(out, order), expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in MASKS if "padding" in kind])
def test_sequences_that_follow_one_another(kind: str, padded: bool) -> None:
    of_q, of_k = [3, 0, 2], [4, 1, 1]
    gaps = [1, 2, 1] if padded else [0, 0, 0]
    starts = [torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (of_q, of_k)]
    places = [
        torch.tensor([0, *(a + b for a, b in zip(n, gaps, strict=True))]).cumsum(0)
        for n in (of_q, of_k)
    ]
    q, k, v = (x[0] for x in qkv(int(places[0][-1]) + 1, int(places[1][-1]), 1))
    layer = te.DotProductAttention(4, 3, 2, qkv_format="thd", attn_mask_type=kind)
    more = {}
    if padded:
        more = {"cu_seqlens_q_padded": places[0].int(), "cu_seqlens_kv_padded": places[1].int()}
    out = layer(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], window_size=(2, 0), **more
    )
    rows: list[Tensor] = []
    for of, (a, c), lengths in zip(
        pairwise(places[0].tolist()),
        pairwise(places[1].tolist()),
        zip(of_q, of_k, strict=True),
        strict=True,
    ):
        i, j = range(of[1] - of[0]), range(c - a)
        seen = torch.tensor([[sees(x, y, lengths, kind, (2, 0), True) for y in j] for x in i])
        if len(i):
            one = attention(q[None, slice(*of)], k[None, a:c], v[None, a:c], seen[None])
            rows.extend(one[0])
    rows.append(torch.zeros(12))  # after the end
    same(out, torch.stack(rows), [q, k, v])
    lengths = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
    bias: dict[str, Any] = {"core_attention_bias_type": "post_scale_bias"}
    with pytest.raises(NotImplementedError, match="thd with a bias of each sequence"):
        layer(q, k, v, core_attention_bias=rand(1, 4, len(q), len(k)), **bias, **lengths)
    with pytest.raises(ValueError, match="are needed for thd"):
        layer(q, k, v)
    with pytest.raises(ValueError, match="it is one of padding"):
        layer(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], attn_mask_type="causal")


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi"])
def test_biases_by_their_definition(kind: str) -> None:
    q, k, v = qkv(5, 5)
    seen = torch.ones(5, 5).tril().bool().expand(2, 5, 5)
    layer = te.DotProductAttention(4, 3, 2, softmax_scale=0.3, qkv_format="bshd")
    how: dict[str, Any] = {"scale": 0.3, "scaled": kind.startswith("pre")}
    if kind == "alibi":
        place = torch.arange(5.0).double()
        slopes = torch.tensor([0.25, 0.0625, 2**-6, 2**-8]).double()
        distance = -(place[:, None] - place).abs() * slopes[:, None, None]
        out = layer(q, k, v, core_attention_bias_type=kind)
        own = layer(q, k, v, core_attention_bias_type=kind, alibi_slopes=slopes.expand(2, 4) * 3)
        close(own, attention(q, k, v, seen, bias=3 * distance.expand(2, 4, 5, 5), **how))
        same(out, attention(q, k, v, seen, bias=distance.expand(2, 4, 5, 5), **how), [q, k, v])
    else:
        bias = rand(1, 4, 5, 5).requires_grad_()
        out = layer(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)
        expected = attention(q, k, v, seen, bias=bias.expand(2, 4, 5, 5), **how)
        same(out, expected, [q, k, v, bias])
        with pytest.raises(ValueError, match="do not fit"):
            layer(q, k, v, core_attention_bias_type=kind)


def test_slopes_of_heads_that_are_no_power_of_two() -> None:
    """As ALiBi's authors have them: those of the power below, and every other of the one above."""
    layer = te.DotProductAttention(6, 3, qkv_format="bshd", attn_mask_type="no_mask")
    q, k, v = qkv(3, 5, h=6, g=6)
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]).double()
    place = torch.arange(3.0)[:, None].double() + 2 - torch.arange(5.0)
    bias = (-place.abs() * slopes[:, None, None]).expand(2, 6, 3, 5)
    expected = attention(q, k, v, torch.ones(2, 3, 5).bool(), bias=bias)
    close(layer(q, k, v, core_attention_bias_type="alibi"), expected)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (1, 0)])
def test_a_sink_takes_weight(kind: str, window: Any) -> None:
    layer = drawn(te.DotProductAttention(4, 3, 2, qkv_format="bshd", softmax_type=kind))
    q, k, v = qkv(5, 5)
    seen = torch.ones(5, 5).tril().bool()
    seen = (seen if window is None else seen.triu(-1)).expand(2, 5, 5)
    sink = layer.softmax_offset if kind == "learnable" else torch.zeros(4).double()
    leaves = [q, k, v, *layer.parameters()]
    same(layer(q, k, v, window_size=window), attention(q, k, v, seen, sink=sink), leaves)


def test_tensors_that_hold_several() -> None:
    layer = te.DotProductAttention(4, 3, qkv_format="bshd", attn_mask_type="no_mask")
    q, k, v = qkv(5, 5, g=4)
    expected = layer(q, k, v)
    close(layer(qkv_layer=torch.stack([q, k, v], 2)), expected)
    close(layer(q, kv_layer=torch.stack([k, v], 3), qkv_interleave_dim=-2), expected)
    with pytest.raises(ValueError, match="queries, keys and values are needed"):
        layer(q)
    for broken in (k[..., :2], k[:, :, :2], k[0]):
        with pytest.raises(ValueError, match="DotProductAttention"):
            layer(q, broken, broken)


def test_groups_of_no_process_are_taken_and_logits_are_refused() -> None:
    layer = te.TransformerLayer(8, 12, 4)
    layer.set_tensor_parallel_group(None)
    layer.set_context_parallel_group(None, [], None)
    layer.self_attention.core_attention.set_context_parallel_group([None, None], [], None)
    with pytest.raises(NotImplementedError, match="return_max_logit is for training"):
        te.DotProductAttention(4, 3, return_max_logit=True)


def test_dropout_is_of_training() -> None:
    layer = te.DotProductAttention(4, 3, attention_dropout=0.5, qkv_format="bshd")
    q, k, v = qkv(8, 8, g=4)
    plain = layer.eval()(q, k, v)
    close(layer(q, k, v), plain)
    for window in (None, (3, 0)):
        torch.manual_seed(0)
        dropped = [layer.train()(q, k, v, window_size=window) for _ in range(2)]
        assert not torch.equal(*dropped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_of_half_types_is_wide(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in qkv(8, 8))
    seen = torch.ones(8, 8).tril().bool()
    for window in (None, (3, 0)):
        layer = te.DotProductAttention(4, 3, 2, qkv_format="bshd")
        out = layer(q, k, v, window_size=window)
        assert out.dtype == dtype
        mask = (seen if window is None else seen.triu(-3)).expand(2, 8, 8)
        expected = attention(q.double(), k.double(), v.double(), mask)
        close(out.double(), expected, 2 * torch.finfo(dtype).eps)


def turned(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """(…, h, d) by (…, 1, r/2) of angles, as complex numbers."""
    half = angle.shape[-1]
    pairs = x[..., : 2 * half]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.split(half, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    parts = torch.stack([z.real, z.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([parts, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotary_embeddings_by_their_definition(percent: float, interleaved: bool) -> None:
    table = te.RotaryPositionEmbedding(8, percent, interleaved=interleaved, rotary_base=100.0)
    r = int(8 * percent)
    assert list(table.state_dict()) == ["inv_freq"]
    freqs = table.double()(7)
    assert freqs.shape == (7, 1, 1, r)
    speed = torch.tensor([100.0 ** (-2 * i / r) for i in range(r // 2)]).double()
    angle = torch.arange(7.0).double()[:, None, None] * speed
    close(freqs[:, 0, 0, ::2] if interleaved else freqs[:, 0, 0, : r // 2], angle[:, 0], 1e-6)
    angle = (freqs[..., ::2] if interleaved else freqs[..., : r // 2])[:, 0].detach()
    x = rand(2, 5, 3, 8).requires_grad_()
    expected = turned(x, angle[:5], interleaved)
    for fused in (False, True):
        how: dict[str, Any] = {"interleaved": interleaved, "fused": fused}
        same(rope.apply_rotary_pos_emb(x, freqs, "bshd", **how), expected, [x])
        out = rope.apply_rotary_pos_emb(x.transpose(0, 1), freqs, **how)
        close(out.transpose(0, 1), expected)
        first = torch.tensor([0, 2])
        late = torch.stack(
            [turned(x[b], angle[o : o + 5], interleaved) for b, o in ((0, 0), (1, 2))]
        )
        close(rope.apply_rotary_pos_emb(x, freqs, "bshd", first, **how), late)
        packed = torch.cat(
            [turned(x[0, :2], angle[:2], interleaved), turned(x[0, 2:], angle[:3], interleaved)]
        )
        starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        close(rope.apply_rotary_pos_emb(x[0], freqs, "thd", cu_seqlens=starts, **how), packed)
    joined = torch.cat([x, x, x, x], -1)
    q, k, v = rope.apply_fused_qkv_rotary_pos_emb(
        joined, freqs, freqs, [16, 8, 8], "bshd", interleaved=interleaved
    )
    close(q, expected.repeat_interleave(2, 2))
    close(k, expected)
    close(v, x)


def test_positions_may_be_interpolated() -> None:
    plain = te.RotaryPositionEmbedding(4)(12)
    table = te.RotaryPositionEmbedding(
        4, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=5
    )
    close(table(9), plain[:9] / 2, 1e-6)
    close(table(12), plain / (12 / 5), 1e-6)
    close(te.RotaryPositionEmbedding(4)(5, offset=7), plain[7:], 1e-6)
    with pytest.raises(ValueError, match="angles of a pair of channels differ"):
        rope.apply_rotary_pos_emb(rand(12, 1, 1, 4), plain, interleaved=True)
    with pytest.raises(NotImplementedError, match="divided among 2 processes"):
        rope.apply_rotary_pos_emb(rand(12, 1, 1, 4), plain, cp_size=2)
