"""Attention of the stand-in for flash_attn, packed or not, by its definition; and an export."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import flash_attn
    from flash_attn import bert_padding, flash_attn_interface
    from flash_attn.layers import rotary
    from flash_attn.modules import mha
    from flash_attn.ops.triton.layer_norm import RMSNorm
    from flash_attn.ops.triton.rotary import apply_rotary
    from flash_attn.utils.generation import GenerationMixin, InferenceParams


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Sequence[float] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, (l, h, d) to (m, g, d), pair by pair: the result, and (h, l) of sums."""
    length, heads, width = q.shape
    seen, shared = k.shape[0], heads // k.shape[1]
    rows, sums = [], torch.full((heads, length), torch.inf, dtype=q.dtype)
    for i in range(length):
        row = []
        for head in range(heads):
            place, of_keys = i + seen - length, head // shared
            low = place - window_size[0] if window_size[0] >= 0 else 0
            high = place + window_size[1] if window_size[1] >= 0 else seen - 1
            if causal:
                high = min(high, place)
            scores, values = [], []
            for j in range(seen):
                if not low <= j <= high:
                    continue
                score = (q[i, head] * k[j, of_keys]).sum() * (scale or 1 / math.sqrt(width))
                if softcap > 0:
                    score = softcap * torch.tanh(score / softcap)
                if slopes is not None:
                    score = score - slopes[head] * abs(place - j)
                scores.append(score)
                values.append(v[j, of_keys])
            if not scores:
                row.append(0.0 * q[i, head])
                continue
            weights = torch.stack(scores).exp()
            sums[head, i] = weights.sum().log().detach()
            row.append((weights[:, None] * torch.stack(values)).sum(0) / weights.sum())
        rows.append(torch.stack(row))
    return torch.stack(rows), sums


def of_batch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    found = [attended(*one, **options) for one in zip(q, k, v, strict=True)]
    return torch.stack([y for y, _ in found]), torch.stack([sums for _, sums in found])


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "back": {"window_size": (1, -1)},
    "ahead": {"window_size": (-1, 0)},
    "causal window": {"causal": True, "window_size": (2, -1)},
    "softcap": {"softcap": 0.7},
    "alibi": {"slopes": (0.5, 0.25, 0.1, 0.7), "causal": True},
    "all": {
        "causal": True,
        "window_size": (3, 3),
        "softcap": 1.5,
        "slopes": (0.5, 0.25, 0.1, 0.7),
        "scale": 0.3,
    },
}
NAMES = {"slopes": "alibi_slopes", "scale": "softmax_scale"}


def theirs(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the reference, as flash_attn calls them."""
    given = {NAMES.get(name, name): value for name, value in options.items()}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = torch.tensor(given["alibi_slopes"], dtype=torch.float64)
    return given


def same_gradients(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    cotangent = rand(*expected.shape)
    ours = torch.autograd.grad(found, leaves, cotangent, retain_graph=True)
    for one, other in zip(
        ours, torch.autograd.grad(expected, leaves, cotangent, retain_graph=True), strict=True
    ):
        assert one.isfinite().all()
        close(one, other)


@pytest.mark.parametrize("sizes", [(5, 5), (3, 6), (6, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_by_its_definition(name: str, sizes: tuple[int, int]) -> None:
    """Of three queries more than keys, causal, the first three see none and give zeros."""
    options, (length, seen) = CASES[name], sizes
    q = rand(2, length, 4, 3).requires_grad_()
    kv = rand(2, seen, 2, 2, 3).requires_grad_()
    k, v = kv.unbind(2)
    expected, sums = of_batch(q, k, v, **options)
    out = flash_attn.flash_attn_func(q, k, v, **theirs(options))
    close(out, expected)
    assert out.is_contiguous()
    close(flash_attn.flash_attn_kvpacked_func(q, kv, **theirs(options)), expected)
    same_gradients(out, expected, [q, kv])
    again, found, dropped = flash_attn.flash_attn_func(
        q, k, v, **theirs(options), return_attn_probs=True
    )
    close(again, expected)
    close(found, sums)
    assert dropped.numel() == 0
    assert not found.requires_grad
    if options.get("causal") and length > seen:
        assert (out[:, : length - seen] == 0).all()
        assert found[:, :, : length - seen].isposinf().all()


def test_slopes_may_differ_in_a_batch() -> None:
    q, k, v = rand(2, 3, 2, 4), rand(2, 5, 1, 4), rand(2, 5, 1, 4)
    slopes = rand(2, 2).abs()
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes)
    close(out[0], attended(q[0], k[0], v[0], slopes=slopes[0].tolist())[0])
    close(out[1], attended(q[1], k[1], v[1], slopes=slopes[1].tolist())[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_keeps_a_dtype(dtype: torch.dtype) -> None:
    q, k, v = (rand(2, 5, 4, 8).to(dtype) for _ in range(3))
    for options in ({}, {"causal": True}, {"window_size": (2, 2), "softcap": 5.0}):
        out = flash_attn.flash_attn_func(q, k, v, **options)
        assert out.dtype == dtype
        expected = of_batch(q.double(), k.double(), v.double(), **options)[0]
        close(out.double(), expected, 4 * torch.finfo(dtype).eps)


LENGTHS = {
    "equal": ((3, 1, 4), (3, 1, 4)),
    "empty": ((0, 2, 0, 3, 0), (0, 2, 0, 3, 0)),
    "other keys": ((2, 0, 4, 1), (5, 2, 1, 0)),
}


def packed(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_do_not_see_each_other(name: str, lengths: str) -> None:
    options, (of_q, of_k) = CASES[name], LENGTHS[lengths]
    q = rand(sum(of_q), 4, 3).requires_grad_()
    kv = rand(sum(of_k), 2, 2, 3).requires_grad_()
    k, v = kv.unbind(1)
    each = [
        attended(*one, **options)
        for one in zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)
        if len(one[0])
    ]
    expected, sums = torch.cat([y for y, _ in each]), torch.cat([s for _, s in each], 1)
    args: list[Any] = [packed(of_q), packed(of_k), max(of_q), max(of_k)]
    out = flash_attn.flash_attn_varlen_func(q, k, v, *args, **theirs(options))
    close(out, expected)
    same_gradients(out, expected, [q, kv])
    again, found, _ = flash_attn.flash_attn_varlen_kvpacked_func(
        q, kv, *args, **theirs(options), return_attn_probs=True
    )
    close(again, expected)
    close(found, sums)


def test_all_three_may_be_in_one_tensor() -> None:
    qkv = rand(2, 5, 3, 2, 4)
    close(
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
        of_batch(*qkv.unbind(2), causal=True)[0],
    )
    flat = qkv[:1, :, :, :, :].flatten(0, 1)
    starts = packed([2, 3])
    expected = [attended(*part.unbind(1), window_size=(1, 0))[0] for part in flat.split([2, 3])]
    out = flash_attn.flash_attn_varlen_qkvpacked_func(flat, starts, 3, window_size=(1, 0))
    close(out, torch.cat(expected))


def test_steps_after_the_last_packed_sequence_are_none() -> None:
    q, k, v = (rand(6, 2, 4).requires_grad_() for _ in range(3))
    slopes, of_q, of_k = rand(2, 2).abs(), (3, 1), (2, 3)
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, packed(of_q), packed(of_k), 3, 4, causal=True, alibi_slopes=slopes
    )
    each = zip(q[:4].split(of_q), k[:5].split(of_k), v[:5].split(of_k), slopes, strict=True)
    expected = [attended(*one, causal=True, slopes=row.tolist())[0] for *one, row in each]
    close(out[:4], torch.cat(expected))
    assert (out[4:] == 0).all()
    for gradient, used in zip(torch.autograd.grad(out.sum(), [q, k, v]), (4, 5, 5), strict=True):
        assert gradient.isfinite().all()
        assert (gradient[used:] == 0).all()


def test_what_attention_does_not_do_is_refused() -> None:
    q, starts = torch.zeros(1, 2, 3, 4), packed([2])
    with pytest.raises(ValueError, match=r"no dropout.*eval"):
        flash_attn.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ValueError, match="heads"):
        flash_attn.flash_attn_func(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="4 dimensions"):
        flash_attn.flash_attn_func(q[0], q[0], q[0])
    with pytest.raises(NotImplementedError, match="paged"):
        flash_attn.flash_attn_varlen_func(
            q[0], q[0], q[0], starts, starts, 2, 2, block_table=starts
        )
    with pytest.raises(NotImplementedError, match="cache of keys"):
        flash_attn.flash_attn_with_kvcache(q, q, q)
    with pytest.raises(NotImplementedError, match="no form"):
        flash_attn_interface._flash_attn_varlen_forward(q)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_padding_is_left_out_and_put_back(dtype: torch.dtype) -> None:
    x = rand(3, 4, 2, 5).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).to(dtype)
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, mask)
    close(rows, x[mask.bool()])
    assert indices.tolist() == [0, 1, 9, 10, 11]
    assert starts.tolist() == [0, 2, 2, 5]
    assert used.tolist() == [2, 0, 3]
    assert starts.dtype == used.dtype == torch.int32
    assert longest >= 3
    back = bert_padding.pad_input(rows, indices, 3, 4)
    close(back, x * mask[..., None, None].to(x.dtype))
    (gradient,) = torch.autograd.grad(back.sum(), x)
    close(gradient, mask[..., None, None].expand_as(x).to(x.dtype))
    unused = torch.zeros_like(mask)
    unused[1, 0] = True
    _, indices, starts, _, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 4, 9, 10, 11]
    assert starts.tolist() == [0, 2, 3, 6]
    assert used.tolist() == [2, 0, 3]


def test_rows_that_hold_several_sequences_are_packed() -> None:
    x, lengths = rand(2, 5, 3), torch.tensor([[2, 1, 0, 0, 0], [4, 0, 0, 0, 0]])
    rows, indices, starts, _ = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert starts.tolist() == [0, 2, 3, 7]
    close(rows, torch.cat([x[0, :3], x[1, :4]]))
    close(bert_padding.index_first_axis_residual(x, torch.tensor([1]))[0], x[1:])


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """(…, l, h, p) by (…, l, r/2), as complex numbers."""
    r, turn = 2 * angles.shape[-1], torch.polar(torch.ones_like(angles), angles)[..., None, :]
    part = x[..., :r]
    if interleaved:
        z = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn
        y = torch.view_as_real(z).flatten(-2)
    else:
        z = torch.complex(part[..., : r // 2], part[..., r // 2 :]) * turn
        y = torch.cat([z.real, z.imag], -1)
    return torch.cat([y, x[..., r:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_that_of_complex_numbers(interleaved: bool) -> None:
    x, table = rand(2, 4, 3, 8).requires_grad_(), rand(9, 3)
    cos, sin, offsets = table.cos(), table.sin(), torch.tensor([5, 0])
    apply: Callable[..., Tensor] = rotary.apply_rotary_emb
    out = apply(x, cos, sin, interleaved)
    assert out.is_contiguous()
    close(out, turned(x, table[:4], interleaved))
    close(apply(x, cos, sin, interleaved, True, 2), turned(x, table[2:6], interleaved))
    each = torch.stack([table[5:9], table[:4]])
    shifted = turned(x, each, interleaved)
    close(apply(x, cos, sin, interleaved, seqlen_offsets=offsets), shifted)
    close(rotary.apply_rotary_emb_torch(x, each.cos(), each.sin(), interleaved), shifted)
    same_gradients(apply(x, cos, sin, interleaved, seqlen_offsets=offsets), shifted, [x])
    close(apply_rotary(out, cos, sin, interleaved=interleaved, conjugate=True), x)
    half = rotary.rotate_half(torch.ones(2), interleaved)
    assert half.tolist() == [-1, 1]


def keys(**options: Any) -> list[str]:
    return list(mha.MHA(8, 4, **options).state_dict())


def test_parameters_of_the_layer_are_called_as_theirs() -> None:
    last = ["out_proj.weight", "out_proj.bias"]
    assert keys(rotary_emb_dim=2, use_flash_attn=True) == ["Wqkv.weight", "Wqkv.bias", *last]
    assert keys(num_heads_kv=2, qkv_proj_bias=False, use_alibi=True, use_flash_attn=True) == [
        "Wqkv.weight",
        *last,
    ]
    filters = ["dwconv_qkv.weight", "dwconv_qkv.bias"]
    assert keys(dwconv=True) == ["Wqkv.weight", "Wqkv.bias", *filters, *last]
    filters = [f"dwconv_{name}.{part}" for name in ("q", "kv") for part in ("weight", "bias")]
    first = ["Wq.weight", "Wq.bias", "Wkv.weight", "Wkv.bias"]
    assert keys(cross_attn=True, dwconv=True) == [*first, *filters, *last]
    layer = mha.MHA(8, 4, 2, fused_bias_fc=True, return_residual=True)
    assert layer.Wqkv.weight.shape == (16, 8)
    assert set(dict(layer.named_children())) == {
        "Wqkv",
        "inner_attn",
        "inner_cross_attn",
        "out_proj",
    }


@pytest.mark.parametrize("heads", [4, 2], ids="{} heads of keys".format)
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
@pytest.mark.parametrize("dwconv", [False, True], ids=["", "filtered"])
def test_the_layer_by_its_definition(flash: bool, heads: int, dwconv: bool) -> None:
    options: dict[str, Any] = {"rotary_emb_dim": 4, "causal": True, "return_residual": True}
    layer = mha.MHA(16, 4, heads, use_flash_attn=flash, dwconv=dwconv, **options).double()
    x = rand(2, 5, 16)
    z = F.linear(x, layer.Wqkv.weight, layer.Wqkv.bias)
    if dwconv:
        parts = [layer.dwconv_qkv] if heads == 4 else [layer.dwconv_q, layer.dwconv_kv]
        weight = torch.cat([part.weight for part in parts])
        bias = torch.cat([part.bias for part in parts])
        z = F.conv1d(F.pad(z.mT, (2, 0)), weight, bias, groups=z.shape[-1]).mT
    q, k, v = z.unflatten(-1, (-1, 4)).split([4, heads, heads], 2)
    angles = torch.arange(5.0)[:, None].double() * torch.tensor([1.0, 0.01]).double()
    q, k = turned(q, angles, False), turned(k, angles, False)
    out, same = layer(x)
    expected = layer.out_proj(of_batch(q, k, v, causal=True)[0].flatten(-2))
    close(out, expected, 1e-7)
    assert same is x


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
def test_the_layer_attends_to_another_sequence(flash: bool) -> None:
    layer = mha.MHA(8, 4, 2, cross_attn=True, causal=True, use_flash_attn=flash).double()
    x, other = rand(2, 3, 8), rand(2, 5, 8)
    q = layer.Wq(x).unflatten(-1, (4, 2))
    k, v = layer.Wkv(other).unflatten(-1, (2, 2, 2)).unbind(2)
    expected = layer.out_proj(of_batch(q, k, v, causal=True)[0].flatten(-2))
    close(layer(x, other), expected)
    chosen = torch.tensor([2])
    narrow = layer(x, other, mixer_subset=chosen)
    close(narrow, expected[:, 2:])


def test_padding_of_keys_hides_them_without_flash() -> None:
    qkv, mask = rand(1, 4, 3, 2, 3), torch.tensor([[True, True, False, True]])
    inner = mha.SelfAttention()
    q, k, v = (t[0] for t in qkv.unbind(2))
    expected = attended(q, k[mask[0]], v[mask[0]])[0]
    close(inner(qkv, key_padding_mask=mask)[0], expected)
    across = mha.CrossAttention()
    close(across(qkv[:, :, 0], qkv[:, :, 1:], key_padding_mask=mask)[0], expected)


def test_the_layer_takes_packed_sequences_and_windows() -> None:
    x, starts = rand(6, 8), packed([2, 4])
    for heads in (4, 2):
        options: dict[str, Any] = {"use_alibi": True, "window_size": (2, 0)}
        layer = mha.MHA(8, 4, heads, use_flash_attn=True, **options).double()
        whole = torch.cat([layer(part[None])[0] for part in x.split([2, 4])])
        close(layer(x, cu_seqlens=starts, max_seqlen=4), whole)
        assert layer.inner_attn.alibi_slopes.tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert mha.get_alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]


def test_what_the_layer_does_not_do_is_refused() -> None:
    layer = mha.MHA(8, 4, rotary_emb_dim=2, use_flash_attn=True, dropout=0.1)
    x = torch.zeros(1, 3, 8)
    layer.eval()(x)
    with pytest.raises(ValueError, match="no dropout"):
        layer.train()(x)
    with pytest.raises(NotImplementedError, match="does not decode"):
        layer(x, inference_params=InferenceParams(5, 2))
    with pytest.raises(NotImplementedError, match="does not decode"):
        layer.allocate_inference_cache(1, 2)
    with pytest.raises(ValueError, match="no key_padding_mask"):
        layer(x, key_padding_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="no rotary"):
        layer(x[0], cu_seqlens=packed([3]))
    with pytest.raises(ValueError, match="cross-attention"):
        layer(x, x)
    with pytest.raises(ValueError, match="need use_flash_attn"):
        mha.MHA(8, 4)(x[0], cu_seqlens=packed([3]))
    with pytest.raises(ValueError, match="need use_flash_attn"):
        mha.MHA(8, 4, use_alibi=True)
    with pytest.raises(ValueError, match="no rotary"):
        mha.MHA(8, 4, cross_attn=True, rotary_emb_dim=2)
    with pytest.raises(ValueError, match="do not fit"):
        mha.MHA(8, 3)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        mha.FlashCrossAttention()(x, x, cu_seqlens=packed([3]))
    with pytest.raises(NotImplementedError, match=r"ParallelMHA.*several devices"):
        mha.ParallelMHA(8, 4, None)
    with pytest.raises(RuntimeError, match="does not generate"):
        GenerationMixin().generate()


def test_attention_is_computed_again_in_training_if_that_is_wanted() -> None:
    layer = mha.MHA(8, 4, checkpointing=True, use_flash_attn=True).double()
    x = rand(1, 3, 8).requires_grad_()
    same_gradients(layer.train()(x), layer.eval()(x), [x])


CODE = """
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.mha import MHA
from flash_attn.ops.triton.layer_norm import RMSNorm
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.norm = RMSNorm(16)
        self.rotary = RotaryEmbedding(4, interleaved=True, scale_base=16)
        self.qkv = nn.Linear(16, 32)
        self.mha = MHA(16, 4, 2, rotary_emb_dim=4, causal=True, use_flash_attn=True)
        self.out = nn.Linear(16, 3)

    def forward(self, ids):
        x = self.embed(ids)
        batch, length = ids.shape
        y, x = self.norm(x, prenorm=True)
        q, kv = self.qkv(y).split([16, 16], -1)
        q, kv = self.rotary(q.view(batch, length, 4, 4), kv.view(batch, length, 2, 2, 4))
        k, v = kv.unbind(2)
        x = x + flash_attn_func(q, k, v, causal=True, window_size=(3, -1), softcap=9.0).view(
            batch, length, 16
        )
        y, x = self.norm(self.mha(x), x, prenorm=True)
        rows, indices, starts, longest, _ = unpad_input(y, ids % 2)
        rows = rows.view(-1, 4, 4)
        packed = flash_attn_varlen_func(rows, rows, rows, starts, starts, longest, longest)
        return self.out(x + pad_input(packed.flatten(1), indices, batch, length))
"""


def test_a_model_that_imports_flash_attn_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {
        "embed": nn.Embedding(12, 16),
        "norm": RMSNorm(16),
        "qkv": nn.Linear(16, 32),
        "mha": mha.MHA(16, 4, 2, rotary_emb_dim=4, causal=True, use_flash_attn=True),
        "out": nn.Linear(16, 3),
    }
    checkpoint, model = saved_with(CODE, **parts)
    verified(tmp_path / "b", (checkpoint, model), ["x:int64[batch,length]<12"], ["flash_attn"])
