"""The stand-in for natten by loops over its definition, values and gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.exporter.models import weights
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import natten
    from natten import functional as nf
    from natten.utils import check_all_args, get_num_na_weights


@dataclass(frozen=True)
class Window:
    """How windows lie along a dimension."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def of(self, place: int, length: int) -> list[tuple[int | None, int]]:
        """Each key of the window at a place, None if it is not seen, and how far ahead it is."""
        group = range(place % self.dilation, length, self.dilation)
        step, count = place // self.dilation, len(group)
        leader = step - step % self.stride
        if self.causal:
            leader = min(leader + self.stride - 1, count - 1)
            first = max(leader - self.kernel + 1, 0)
        else:
            leader = min(leader + self.stride // 2, count - 1)
            first = min(max(leader - self.kernel // 2, 0), count - self.kernel)
        window = range(first, first + self.kernel)
        seen = [not self.causal or key <= step for key in window]
        return [
            (group[key] if is_seen else None, key - step)
            for key, is_seen in zip(window, seen, strict=True)
        ]


def scored(q: Tensor, k: Tensor, windows: Sequence[Window], bias: Tensor | None = None) -> Tensor:
    """(b, h, L…, d) and as many keys → (b, h, L…, Πk), -inf where nothing is seen."""
    lengths = q.shape[2:-1]
    rows = []
    for place in product(*map(range, lengths)):
        row = []
        for keys in product(*(w.of(i, n) for w, i, n in zip(windows, place, lengths, strict=True))):
            if any(key is None for key, _ in keys):
                row.append(torch.full(q.shape[:2], -torch.inf).double())
                continue
            score = q[(..., *place, slice(None))] * k[(..., *(i for i, _ in keys), slice(None))]
            score = score.sum(-1)
            if bias is not None:
                middle = (ahead + w.kernel - 1 for (_, ahead), w in zip(keys, windows, strict=True))
                score = score + bias[(slice(None), *middle)]
            row.append(score)
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, 2).unflatten(2, lengths)


def summed(p: Tensor, v: Tensor, windows: Sequence[Window]) -> Tensor:
    """(b, h, L…, Πk) and (b, h, L…, d) → (b, h, L…, d)."""
    lengths = v.shape[2:-1]
    rows = []
    for place in product(*map(range, lengths)):
        windowed = product(*(w.of(i, n) for w, i, n in zip(windows, place, lengths, strict=True)))
        terms = [
            p[(..., *place, slot, None)] * v[(..., *(i for i, _ in keys), slice(None))]
            for slot, keys in enumerate(windowed)
            if all(key is not None for key, _ in keys)
        ]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows, 2).unflatten(2, lengths)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[Window],
    scale: float,
    bias: Tensor | None = None,
    added: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Heads last, (b, L…, h, d); keys may have fewer heads; the logarithms of sums, (b, L…, h)."""
    shared = q.shape[-2] // k.shape[-2]
    k, v, *added = (t.repeat_interleave(shared, -2).movedim(-2, 1) for t in (k, v, *added))
    q = q.movedim(-2, 1) * scale
    scores = scored(q, k, windows, bias)
    beside = torch.einsum("bh...d,bhmd->bh...m", q, added[0]) if added else scores[..., :0]
    sums = torch.cat([scores, beside], -1).logsumexp(-1, keepdim=True)
    out = summed((scores - sums).exp(), v, windows)
    if added:
        out = out + torch.einsum("bh...m,bhmd->bh...d", (beside - sums).exp(), added[1])
    return out.movedim(1, -2), sums[..., 0].movedim(1, -1)


def same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    """Values, and gradients of `leaves`."""
    close(found, expected)
    cotangent = rand(*expected.shape)
    pair = [
        torch.autograd.grad(y, leaves, cotangent, retain_graph=True, allow_unused=True)
        for y in (found, expected)
    ]
    for one, other in zip(*pair, strict=True):
        close(torch.zeros(()) if one is None else one, torch.zeros(()) if other is None else other)


def asked(windows: Sequence[Window]) -> dict[str, Any]:
    names = {"kernel_size": "kernel", "stride": "stride"}
    names |= {"dilation": "dilation", "is_causal": "causal"}
    return {name: tuple(getattr(w, of) for w in windows) for name, of in names.items()}


CASES = {
    "plain": ([Window(3)], (11,)),
    "as long as the window": ([Window(5)], (5,)),
    "even": ([Window(4)], (9,)),
    "longer than a tile": ([Window(7)], (41,)),
    "dilated, groups of two lengths": ([Window(3, dilation=3)], (11,)),
    "one key in many": ([Window(2, dilation=4)], (9,)),
    "causal": ([Window(4, causal=True)], (9,)),
    "strides": ([Window(5, stride=3)], (13,)),
    "whole strides": ([Window(4, stride=4)], (10,)),
    "causal, strides, dilated": ([Window(4, 2, 2, True)], (13,)),
    "2-D": ([Window(3), Window(5)], (4, 9)),
    "2-D, of a tile and one more": ([Window(3), Window(3)], (8, 4)),
    "2-D, dilated": ([Window(3, dilation=2), Window(3)], (7, 4)),
    "2-D, all": ([Window(3, 2, 1, True), Window(4, 3, 2)], (5, 9)),
    "3-D": ([Window(3), Window(3), Window(3)], (4, 3, 3)),
    "3-D, all": ([Window(2, 2, 1, True), Window(3, 1, 2), Window(2)], (3, 6, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_by_its_definition(name: str) -> None:
    windows, lengths = CASES[name]
    rank = len(lengths)
    function = (nf.na1d, nf.na2d, nf.na3d)[rank - 1]
    q = rand(2, *lengths, 4, 3).requires_grad_()
    k, v = (rand(2, *lengths, 2, d).requires_grad_() for d in (3, 2))
    beside = [rand(2, 3, 2, d).requires_grad_() for d in (3, 2)]
    named = asked(windows)
    kernel = named.pop("kernel_size")
    expected, _ = attended(q, k, v, windows, 3**-0.5)
    out = function(q, k, v, kernel, **named)
    same(out, expected, [q, k, v])
    assert out.is_contiguous()
    found = nf.neighborhood_attention_generic(
        q, k, v, kernel, **named, scale=0.3, return_lse=True,
        additional_keys=beside[0], additional_values=beside[1],
    )  # fmt: skip
    for one, other in zip(found, attended(q, k, v, windows, 0.3, None, beside), strict=True):
        same(one, other, [q, k, v, *beside])


@pytest.mark.parametrize("name", CASES)
def test_scores_and_weights_by_their_definition(name: str) -> None:
    windows, lengths = CASES[name]
    windows = [replace(w, kernel=w.kernel | 1, stride=1) for w in windows]
    lengths = tuple(max(n, w.kernel * w.dilation) for n, w in zip(lengths, windows, strict=True))
    rank = len(lengths)
    qk = (nf.na1d_qk, nf.na2d_qk, nf.na3d_qk)[rank - 1]
    av = (nf.na1d_av, nf.na2d_av, nf.na3d_av)[rank - 1]
    q, k, v = (rand(2, 3, *lengths, 2).requires_grad_() for _ in range(3))
    keys, values = (rand(2, 3, 4, 2).requires_grad_() for _ in range(2))
    named = asked(windows)
    del named["stride"]
    expected = scored(q, k, windows)
    columns = expected.shape[-1]
    seen = expected > -torch.inf
    scores = qk(q, k, **named)
    assert torch.equal(scores > -torch.inf, seen)
    assert scores.is_contiguous()
    same(scores[seen], expected[seen], [q, k])
    more = qk(q, k, **named, additional_keys=keys)
    close(more[..., :columns][seen], scores[seen])
    same(more[..., columns:], torch.einsum("bh...d,bhmd->bh...m", q, keys), [q, keys])
    p = rand(2, 3, *lengths, columns + 4).requires_grad_()
    same(av(p[..., :columns], v, **named), summed(p, v, windows), [p, v])
    beside = torch.einsum("bh...m,bhmd->bh...d", p[..., columns:], values)
    found = av(p, v, **named, additional_values=values)
    same(found, summed(p, v, windows) + beside, [p, v, values])


@pytest.mark.parametrize(
    ("kernel", "dilation", "lengths"),
    [(3, 1, (7,)), (5, 2, (11,)), (3, 1, (4, 5)), (3, 2, (7, 6)), (3, 1, (3, 4, 3))],
    ids=str,
)
def test_biases_of_relative_places_by_their_definition(
    kernel: int, dilation: int, lengths: tuple[int, ...]
) -> None:
    rank = len(lengths)
    windows = [Window(kernel, dilation=dilation)] * rank
    q, k, v = (rand(2, 3, *lengths, 2).requires_grad_() for _ in range(3))
    bias = rand(3, *[2 * kernel - 1] * rank).requires_grad_()
    expected = scored(q, k, windows, bias)
    older = (nf.natten1dqkrpb, nf.natten2dqkrpb, nf.natten3dqkrpb)[rank - 1]
    sizes = (kernel, kernel, dilation, dilation) if rank == 3 else (kernel, dilation)
    same(older(q, k, bias, *sizes), expected, [q, k, bias])
    newer = (nf.na1d_qk, nf.na2d_qk, nf.na3d_qk)[rank - 1]
    close(newer(q, k, kernel, dilation, rpb=bias), expected)
    named = (nf.na1d_qk_with_bias, nf.na2d_qk_with_bias, nf.na3d_qk_with_bias)[rank - 1]
    close(named(q, k, bias, *sizes), expected)
    plain = (nf.natten1dqk, nf.natten2dqk, nf.natten3dqk)[rank - 1]
    close(plain(q, k, *sizes), scored(q, k, windows))
    p = rand(*expected.shape)
    av = (nf.natten1dav, nf.natten2dav, nf.natten3dav)[rank - 1]
    close(av(p, v, *sizes), summed(p, v, windows))
    last = [t.movedim(1, -2) for t in (q, k, v)]
    fused = (natten.na1d, natten.na2d, natten.na3d)[rank - 1]
    out = fused(*last, kernel_size=kernel, dilation=dilation, rpb=bias, scale=0.4)
    same(out, attended(*last, windows, 0.4, bias)[0], [q, k, v, bias])


def test_sizes_of_3_d_may_be_of_the_first_dimension_and_of_the_others() -> None:
    q, k, v = (rand(1, 2, 7, 3, 4, 2) for _ in range(3))
    windows = [Window(3, dilation=2), Window(3), Window(3)]
    close(nf.na3d_qk(q, k, 3, 3, 2, 1), scored(q, k, windows))
    close(nf.na3d_qk(q, k, (3, 3, 3), (2, 1, 1)), scored(q, k, windows))
    p = rand(1, 2, 7, 3, 4, 27)
    named = {"kernel_size_d": 3, "kernel_size": 3, "dilation_d": 2, "dilation": 1}
    close(nf.na3d_av(p, v, **named), summed(p, v, windows))
    close(nf.na3d_av(p, v, 3, (2, 1, 1)), summed(p, v, windows))


def test_gradients_are_those_of_differences() -> None:
    q, k, v = (rand(1, 4, 3, 2, 2).requires_grad_() for _ in range(3))
    bias = rand(2, 5, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: natten.na2d(*t[:3], 3, rpb=t[3]), (q, k, v, bias))
    q, k, v = (rand(1, 2, 7, 2).requires_grad_() for _ in range(3))

    def in_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nf.na1d_av(nf.na1d_qk(q, k, 3, 2, None, True).softmax(-1), v, 3, 2, None, True)

    assert torch.autograd.gradcheck(in_two, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_keeps_a_dtype(dtype: torch.dtype) -> None:
    q, k, v = (rand(2, 6, 5, 3, 8).to(dtype) for _ in range(3))
    out, sums = natten.na2d(q, k, v, 3, return_lse=True)
    assert (out.dtype, sums.dtype) == (dtype, torch.float32)
    expected, logarithms = attended(q.double(), k.double(), v.double(), [Window(3)] * 2, 8**-0.5)
    close(out.double(), expected, 4 * torch.finfo(dtype).eps * float(expected.abs().max()))
    close(sums.double(), logarithms, 1e-5)
    q, k, v = (t.movedim(-2, 1) for t in (q, k, v))
    scores = nf.na2d_qk(q, k, 3)
    assert scores.dtype == dtype
    expected = scored(q.double(), k.double(), [Window(3)] * 2)
    close(scores.double(), expected, 4 * torch.finfo(dtype).eps * float(expected.abs().max()))
    assert nf.na2d_av(scores.softmax(-1), v, 3).dtype == dtype


def test_attention_to_all_and_to_several_in_one() -> None:
    q = rand(2, 5, 4, 3).requires_grad_()
    k, v = rand(2, 7, 2, 3).requires_grad_(), rand(2, 7, 2, 3)
    scores = torch.einsum("blhd,bmhd->bhlm", q, k.repeat_interleave(2, 2)) * 0.3
    values = v.repeat_interleave(2, 2)
    expected = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), values)
    out, sums = natten.attention(q, k, v, scale=0.3, return_lse=True)
    same(out, expected, [q, k])
    same(sums, scores.logsumexp(-1).transpose(1, 2), [q, k])
    parts = [natten.attention(q, k[:, at], v[:, at], scale=0.3, return_lse=True)
             for at in (slice(3), slice(3, 4), slice(4, 7))]  # fmt: skip
    merged = natten.merge_attentions([o for o, _ in parts], [s for _, s in parts])
    same(merged[0], expected, [q, k])
    same(merged[1], sums, [q, k])
    later = torch.ones(5, 7).triu(1).bool()
    causal = scores.masked_fill(later, -torch.inf).softmax(-1)
    close(natten.attention(q, k, v, True, 0.3), torch.einsum("bhlm,bmhd->blhd", causal, values))


SIZES = {"num_heads": 2, "kernel_size": 3}
READ: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Window, bool | None]] = {
    "NAT": ("2D", (8,), SIZES | {"dilation": None, "bias": True}, Window(3), True),
    "0.15": ("2D", (8, 2, 3), {"dilation": 2, "bias": False}, Window(3, 1, 2), False),
    "0.15, by place": ("1D", (8, 2, 3, 1, False, True, None, 0.1), {}, Window(3), False),
    "0.15, 3-D": ("3D", (8, 2, 3, None, 2), {"dilation_d": 2}, Window(3, 1, 2), True),
    "0.17": ("2D", (8, 2, 3), {"dilation": 2, "rel_pos_bias": True}, Window(3, 1, 2), True),
    "0.17, causal": ("1D", (8, 2, 3), {"is_causal": True}, Window(3, 1, 1, True), False),
    "0.17, even": ("2D", (), SIZES | {"dim": 8, "kernel_size": (4, 4)}, Window(4), False),
    "0.20": ("2D", (8, 2, 3), {"stride": 2, "dilation": 3}, Window(3, 2, 3), False),
    "0.20, by place": ("3D", (8, 2, 3, 2, 1, True), {}, Window(3, 2, 1, True), False),
    "0.20, by name": ("3D", (), SIZES | {"embed_dim": 8}, Window(3), False),
    "either": ("2D", (8, 2, 3), {}, Window(3), None),
}


@pytest.mark.parametrize("name", READ)
def test_layers_are_read_as_of_their_version(name: str) -> None:
    of, args, kwargs, window, has_bias = READ[name]
    layer = getattr(natten, f"NeighborhoodAttention{of}")(*args, **kwargs)
    rank = int(of[0])
    assert (layer.kernel_size, layer.stride) == ((window.kernel,) * rank, (window.stride,) * rank)
    assert (layer.dilation, layer.is_causal) == ((window.dilation,) * rank, (window.causal,) * rank)
    assert layer.is_settled == (has_bias is not None)
    assert (layer.rpb is not None) == bool(has_bias)


@pytest.mark.parametrize("given", [{"rel_pos_bias": True}, {"stride": 2, "qk_scale": 0.3}], ids=str)
def test_a_layer_is_attention_between_linear_ones(given: dict[str, Any]) -> None:
    layer = natten.NeighborhoodAttention2D(8, 2, kernel_size=(3, 5), dilation=(2, 1), **given)
    layer.double().eval()
    assert {n.split(".")[0] for n in layer.state_dict()} == {
        "qkv", "proj", *(["rpb"] if "rel_pos_bias" in given else [])
    }  # fmt: skip
    x = rand(2, 7, 6, 8).requires_grad_()
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3)
    stride = given.get("stride", 1)
    windows = [Window(3, stride, 2), Window(5, stride)]
    expected, _ = attended(q, k, v, windows, given.get("qk_scale", 0.5), layer.rpb)
    same(layer(x), layer.proj(expected.flatten(-2)), [x, *layer.parameters()])


def test_a_layer_of_before_pads_what_is_smaller_than_a_window() -> None:
    layer = natten.NeighborhoodAttention2D(8, 2, 5, bias=True).double()
    x = rand(1, 3, 7, 8)
    padded = nn.functional.pad(x, (0, 0, 0, 0, 0, 2))
    close(layer(x), layer(padded)[:, :3])
    with pytest.raises(ValueError, match=r"kernel of 5 .* does not fit into an input of \(3, 7\)"):
        natten.NeighborhoodAttention2D(8, 2, 5, rel_pos_bias=True).double()(x)


def test_weights_are_dropped_in_training_alone() -> None:
    torch.manual_seed(0)
    layer = natten.NeighborhoodAttention1D(4, 2, 3, attn_drop=0.5, rel_pos_bias=False).double()
    x = rand(1, 9, 4)
    assert not torch.allclose(layer(x), layer(x))
    layer.attn_drop.p = 1e-300
    dropped = layer(x)
    close(dropped, layer.eval()(x))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_say_whether_there_are_biases_where_code_does_not(prefix: str) -> None:
    def made(**given: bool) -> nn.Module:
        layers = {n: natten.NeighborhoodAttention2D(8, 2, 3, **given) for n in ("attn", "other")}
        return nn.ModuleDict(layers)

    for older in (True, False):
        state = made(bias=older).state_dict()
        net = made()
        weights.fit(net, {f"{prefix}{name}": t for name, t in state.items()}, "file")
        assert net.state_dict().keys() == state.keys()
        assert net["attn"].pads is older
        net = made()
        net.load_state_dict(state)
        assert (net["other"].rpb is not None) == older
    with pytest.raises(Exception, match=r"unexpected: attn\.rpb, other\.rpb"):
        weights.fit(made(rel_pos_bias=False), made(bias=True).state_dict(), "file")


def test_what_natten_refuses_is_refused() -> None:
    x = torch.zeros(1, 6, 6, 2, 4)
    with pytest.raises(ValueError, match=r"kernel of 3 with a dilation of 3 .* \(6, 6\)"):
        natten.na2d(x, x, x, 3, dilation=3)
    with pytest.raises(ValueError, match="stride of 4 is larger than the kernel's 3"):
        natten.na2d(x, x, x, 3, stride=4)
    with pytest.raises(ValueError, match="kernel_size is 1, not 2 integers from 2 on"):
        natten.na2d(x, x, x, 1)
    with pytest.raises(ValueError, match=r"dilation is \(1,\), not 2 integers"):
        natten.na2d(x, x, x, 3, dilation=(1,))
    with pytest.raises(ValueError, match="is_causal is"):
        natten.na2d(x, x, x, 3, is_causal=(True,))
    with pytest.raises(TypeError, match=r"sizes by their place.*call it with dilation= or stride="):
        natten.na2d(x, x, x, 3, 2)
    with pytest.raises(TypeError, match=r"sizes by their place.*dilation=, stride="):
        natten.NeighborhoodAttention2D(8, 2, 3, 2)
    with pytest.raises(TypeError, match=r"natten's na2d: .*colour"):
        natten.na2d(x, x, x, 3, colour=1)
    with pytest.raises(ValueError, match="tensors of 4 dimensions"):
        natten.na1d(x, x, x, 3)
    with pytest.raises(ValueError, match="batches, places or heads"):
        natten.na2d(x, x[:, :5], x[:, :5], 3)
    with pytest.raises(ValueError, match="heads or channels"):
        natten.na2d(x, x[..., :3], x, 3)
    with pytest.raises(ValueError, match="come together"):
        natten.na2d(x, x, x, 3, additional_keys=x[:, 0])
    with pytest.raises(ValueError, match="an additional tensor is"):
        natten.na2d(x, x, x, 3, additional_keys=x[0], additional_values=x[0])
    bias = torch.zeros(2, 5, 5)
    with pytest.raises(NotImplementedError, match="where it is causal"):
        natten.na2d(x, x, x, 3, is_causal=True, rpb=bias)
    with pytest.raises(ValueError, match=r"rpb is \(2, 5, 4\), not \(2, 5, 5\)"):
        natten.na2d(x, x, x, 3, rpb=bias[..., 1:])
    first = x.movedim(-2, 1)
    with pytest.raises(ValueError, match=r"na2d_qk of odd kernels alone, and they are \(4, 4\)"):
        nf.na2d_qk(first, first, 4)
    with pytest.raises(ValueError, match="key"):
        nf.na2d_qk(first, first[:, :1], 3)
    with pytest.raises(ValueError, match="9 weights at each place"):
        nf.na2d_av(torch.zeros(1, 2, 6, 6, 8), first, 3)
    with pytest.raises(NotImplementedError, match="packed sequences"):
        natten.attention(x[0], x[0], x[0], seqlens_Q=torch.ones(6), seqlens_KV=torch.ones(6))
    with pytest.raises(ValueError, match="3 heads do not divide 8 channels"):
        natten.NeighborhoodAttention2D(8, 3, 3)
    with pytest.raises(ValueError, match="merged at least"):
        natten.merge_attentions([x[0]], [x[0, ..., 0]])
    with pytest.raises(NotImplementedError, match="count operations"):
        natten.flops.add_natten_handle(None)


def test_what_chooses_kernels_is_remembered() -> None:
    assert natten.has_fused_na()
    assert not natten.has_cuda()
    assert not natten.is_fused_na_enabled()
    natten.use_fused_na(True, kv_parallel=False)
    assert natten.is_fna_enabled()
    natten.use_fused_na(False)
    assert not natten.is_fused_na_enabled()
    natten.use_autotuner(True, thorough_mode_forward=True)
    natten.disable_autotuner()
    assert not natten.is_autotuner_enabled_for_forward()
    natten.set_memory_usage_preference("strict")
    assert natten.is_memory_usage_strict()
    natten.set_memory_usage_preference()
    assert natten.is_memory_usage_default()
    with pytest.raises(ValueError, match="default, strict, unrestricted, not 'all'"):
        natten.set_memory_usage_preference("all")
    assert check_all_args(2, 3, None, False) == ((3, 3), (1, 1), (False, False))
    assert check_all_args(1, (3,), 2, [4], True) == ((3,), (2,), (4,), (True,))
    assert get_num_na_weights((3, 5)) == prod((3, 5))
