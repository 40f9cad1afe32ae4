"""The stand-in for xformers by its definitions, values and gradients; and an export."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.by_stand_ins import verified
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    from xformers import ops
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias as biases
    from xformers.ops.swiglu_op import swiglu_packed

Seen = Callable[[int, int, int, int], bool]
"""Of a query, a key, and how many there are of both."""


def attended(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None = None) -> Tensor:
    """(b, l, h, d) by (b, h, l, m), -inf where nothing is seen; weights by their exponentials."""
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * (scale or q.shape[-1] ** -0.5) + added
    weights = scores.exp()
    return torch.einsum("bhlm,bmhe->blhe", weights / weights.sum(-1, keepdim=True), v)


def masked(seen: Seen, length: int, keys: int) -> Tensor:
    rows = [[seen(i, j, length, keys) for j in range(keys)] for i in range(length)]
    return torch.zeros(length, keys).double().masked_fill(~torch.tensor(rows), -torch.inf)


def same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    """Values, and gradients of `leaves`."""
    close(found, expected)
    cotangent = rand(*expected.shape)
    pair = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (found, expected)]
    for one, other in zip(*pair, strict=True):
        close(one, other)


PLACES: dict[str, tuple[Any, Seen]] = {
    "none": (None, lambda i, j, n, m: True),
    "first": (biases.LowerTriangularMask(device="cpu"), lambda i, j, n, m: j <= i),
    "last": (biases.LowerTriangularFromBottomRightMask(), lambda i, j, n, m: j <= i + m - n),
    "last, local": (
        biases.LowerTriangularFromBottomRightMask().make_local_attention(2),
        lambda i, j, n, m: i + m - n - 2 < j <= i + m - n,
    ),
    "window": (
        biases.LocalAttentionFromBottomRightMask(1, 2),
        lambda i, j, n, m: i + m - n - 1 <= j <= i + m - n + 2,
    ),
}


@pytest.mark.parametrize("sizes", [(5, 5), (3, 6)], ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_attention_by_its_definition(name: str, sizes: tuple[int, int]) -> None:
    (bias, seen), (length, keys) = PLACES[name], sizes
    q, k, v = (rand(2, n, 3, 4).requires_grad_() for n in (length, keys, keys))
    added = masked(seen, length, keys)
    for scale in (None, 0.3):
        out = ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale, op=None)
        same(out, attended(q, k, v, added, scale), [q, k, v])
        assert out.is_contiguous()
    if bias is not None:
        assert torch.equal(bias.materialize((2, length, keys), torch.float64)[1], added)
        assert bias.to("cpu") is bias


def test_heads_may_be_one_or_in_groups() -> None:
    q, k, v = rand(2, 3, 4).requires_grad_(), rand(2, 5, 4), rand(2, 5, 6)
    bias = rand(2, 3, 5)
    expected = attended(*(t[:, :, None] for t in (q, k, v)), bias[:, None])[:, :, 0]
    same(ops.memory_efficient_attention_forward(q, k, v, bias), expected, [q])
    q, kept = rand(2, 3, 2, 3, 4).requires_grad_(), rand(2, 5, 2, 1, 4).requires_grad_()
    k, bias = kept.expand(-1, -1, -1, 3, -1), rand(2, 2, 3, 3, 5)
    expected = attended(*(t.flatten(2, 3) for t in (q, k, k)), bias.flatten(1, 2))
    found = ops.memory_efficient_attention(q, k, k, bias)
    assert found.shape == q.shape
    same(found.flatten(2, 3), expected, [q, kept])


def test_a_bias_has_a_gradient_also_beside_a_mask() -> None:
    q, bias = rand(2, 4, 3, 2).requires_grad_(), rand(2, 3, 4, 4).requires_grad_()
    same(ops.memory_efficient_attention(q, q, q, bias), attended(q, q, q, bias), [q, bias])
    mask = ops.LowerTriangularMask().add_bias(bias)
    assert isinstance(mask, fmha.LowerTriangularMaskWithTensorBias)
    expected = attended(q, q, q, bias + masked(PLACES["first"][1], 4, 4))
    same(ops.memory_efficient_attention(q, q, q, mask), expected, [q, bias])
    found = mask.materialize((2, 3, 4, 4), torch.float64)
    assert torch.equal(found, bias + masked(PLACES["first"][1], 4, 4))
    older = ops.memory_efficient_attention(q, q, q, bias.flatten(0, 1))
    close(older, attended(q, q, q, bias))
    hidden = masked(lambda i, j, n, m: j < 3, 4, 4).expand(2, 3, 4, 4)
    same(ops.memory_efficient_attention(q, q, q, hidden), attended(q, q, q, hidden), [q])


BLOCKS: dict[str, tuple[Callable[[Any], Any], Seen]] = {
    "whole": (lambda mask: mask, PLACES["none"][1]),
    "first": (lambda mask: mask.make_causal(), PLACES["first"][1]),
    "last": (lambda mask: mask.make_causal_from_bottomright(), PLACES["last"][1]),
    "first, local": (lambda mask: mask.make_local_attention(2), lambda i, j, n, m: i - 2 < j <= i),
    "last, local": (
        lambda mask: mask.make_local_attention_from_bottomright(2),
        PLACES["last, local"][1],
    ),
}


@pytest.mark.parametrize("of_k", [None, [3, 3, 1, 4]], ids=["same", "other"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_do_not_see_each_other(name: str, of_k: list[int] | None) -> None:
    (made, seen), of_q = BLOCKS[name], [2, 2, 1, 4]
    mask = made(fmha.BlockDiagonalMask.from_seqlens(of_q, of_k))
    lengths = of_k or of_q
    q, k, v = (rand(1, sum(n), 3, 4).requires_grad_() for n in (of_q, lengths, lengths))
    each = [masked(seen, *sizes) for sizes in zip(of_q, lengths, strict=True)]
    pieces = [*zip(q.split(of_q, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)]
    expected = torch.cat([attended(*p, m) for p, m in zip(pieces, each, strict=True)], 1)
    same(ops.memory_efficient_attention(q, k, v, mask), expected, [q, k, v])
    added = mask.materialize((sum(of_q), sum(lengths)), torch.float64)
    close(attended(q, k, v, added), expected)
    assert mask.q_seqinfo.seqstart.tolist() == [0, 2, 4, 5, 9]
    assert (mask.q_seqinfo.min_seqlen, mask.q_seqinfo.max_seqlen) == (1, 4)
    assert [*mask.q_seqinfo.intervals()][1] == (2, 4)


def test_tensors_become_blocks_and_come_back() -> None:
    parts = [rand(2, 3, 4), rand(1, 5, 4), rand(3, 1, 4)]
    mask, x = fmha.BlockDiagonalMask.from_tensor_list(parts)
    assert mask.q_seqinfo.lengths == [3, 3, 5, 1, 1, 1]
    assert x.shape == (1, 14, 4)
    for found, part in zip(mask.split(x), parts, strict=True):
        assert torch.equal(found, part)
    plain = fmha.BlockDiagonalMask.from_seqlens([9, 5])
    assert [t.shape for t in plain.split(x)] == [(1, 9, 4), (1, 5, 4)]
    keys = [rand(2, 2, 4), rand(1, 1, 4), rand(3, 4, 4)]
    mask, q, k, v = fmha.BlockDiagonalCausalMask.from_tensor_lists_qkv(parts, keys, keys)
    assert isinstance(mask, fmha.BlockDiagonalCausalMask)
    assert (q.shape, k.shape) == ((1, 14, 4), (1, 17, 4))
    assert torch.equal(mask.split_queries(q)[2], parts[2])
    assert torch.equal(mask.split_kv(v)[0], keys[0])


def test_what_attention_does_not_do_is_refused() -> None:
    q = torch.zeros(2, 3, 2, 4)
    with pytest.raises(ValueError, match=r"no dropout, and p is 0\.1"):
        ops.memory_efficient_attention(q, q, q, p=0.1)
    with pytest.raises(ValueError, match="heads or channels"):
        ops.memory_efficient_attention(q, q[:, :, :1], q)
    with pytest.raises(ValueError, match="3, 4 or 5 dimensions"):
        ops.memory_efficient_attention(q, q[0], q)
    with pytest.raises(ValueError, match=r"bool.*-inf"):
        ops.memory_efficient_attention(q, q, q, torch.ones(2, 2, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="batch of 1"):
        ops.memory_efficient_attention(q, q, q, fmha.BlockDiagonalMask.from_seqlens([3]))
    with pytest.raises(ValueError, match="1 blocks of queries and 2"):
        fmha.BlockDiagonalMask.from_seqlens([3], [1, 2])
    with pytest.raises(ValueError, match="at least one key"):
        fmha.BlockDiagonalMask.from_seqlens([3]).make_local_attention(0)
    with pytest.raises(ValueError, match="below 0"):
        biases.LocalAttentionFromBottomRightMask(-1, 2)
    with pytest.raises(NotImplementedError, match="no cache of keys"):
        fmha.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3], 4, [2])
    with pytest.raises(NotImplementedError, match="a AttentionBias"):
        ops.memory_efficient_attention(q, q, q, ops.AttentionBias())
    with pytest.raises(NotImplementedError, match="only as a whole"):
        ops.memory_efficient_attention_forward_requires_grad(q, q, q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_keeps_a_dtype(dtype: torch.dtype) -> None:
    q, k, v = (rand(2, 5, 4, 8).to(dtype) for _ in range(3))
    out = ops.memory_efficient_attention(q, k, v, ops.LowerTriangularMask())
    assert out.dtype == dtype
    expected = attended(q.double(), k.double(), v.double(), masked(PLACES["first"][1], 5, 5))
    close(out.double(), expected, 4 * torch.finfo(dtype).eps)
    assert (
        ops.memory_efficient_attention(q, k, v, output_dtype=torch.float32).dtype == torch.float32
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_swiglu_by_its_definition(bias: bool, packed: bool) -> None:
    layer = ops.SwiGLU(4, 6, 3, bias, _pack_weights=packed).double()
    first = ["w12"] if packed else ["w1", "w2"]
    parts = ["weight", "bias"] if bias else ["weight"]
    assert list(layer.state_dict()) == [
        f"{name}.{part}" for name in (*first, "w3") for part in parts
    ]
    x = rand(2, 5, 4).requires_grad_()
    weight = torch.cat([getattr(layer, name).weight for name in first])
    shift = torch.cat([getattr(layer, name).bias for name in first]) if bias else torch.zeros(12)
    gate, value = (x @ weight.T + shift).split(6, -1)
    expected = (gate * torch.sigmoid(gate) * value) @ layer.w3.weight.T
    expected = expected + (layer.w3.bias if bias else 0.0)
    leaves = [x, *layer.parameters()]
    same(layer(x), expected, leaves)
    w12, b12 = weight.unflatten(0, (2, 6)), shift.double().unflatten(0, (2, 6)) if bias else None
    same(swiglu_packed(x, w12, b12, layer.w3.weight, layer.w3.bias), expected, leaves)
    assert (ops.SwiGLU(4, None).hidden_features, ops.SwiGLU(4, 6).out_features) == (4, 4)


def test_norms_by_their_definition() -> None:
    x, y = rand(2, 5, 4).requires_grad_(), rand(2, 5, 4)
    layer = ops.RMSNorm(4, eps=0.1).double()
    nn.init.normal_(layer.weight)

    def normal(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()

    same(layer(x), normal(x) * layer.weight, [x, layer.weight])
    same(ops.RMSNorm(4, False, 0.1)(x), normal(x), [x])
    total = x.detach().clone()
    close(layer.increment_and_forward_(total, y), normal(x + y) * layer.weight)
    close(total, x + y)


def test_rows_by_index_are_joined_and_added() -> None:
    x, z = rand(4, 6).requires_grad_(), rand(3, 5).requires_grad_()
    i, j = torch.tensor([2, 0]), torch.tensor([1])
    expected = torch.cat([x[2], x[0], z[1]])
    same(ops.index_select_cat([x, z], [i, j]), expected, [x, z])
    base, source, scaling = rand(4, 3, 5), rand(2, 3, 5).requires_grad_(), rand(5).requires_grad_()
    for factor in (None, scaling):
        target = base.clone()
        out = ops.scaled_index_add(target, i, source, factor, 0.5)
        added = 0.5 * source * (1.0 if factor is None else factor)
        expected = torch.stack([base[0] + added[1], base[1], base[2] + added[0], base[3]])
        same(out, expected, [source] if factor is None else [source, scaling])
        assert out is target
    q, k = ops.unbind(rand(3, 2, 4), 1)
    assert ops.stack_or_none([q, k], 1).shape == (3, 2, 4)


CODE = """
import xformers.ops
import torch
from torch import nn
from xformers.ops import fmha, memory_efficient_attention, unbind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.swiglu = xformers.ops.SwiGLU(8, 12)
        self.norm = xformers.ops.RMSNorm(8)
        self.out = nn.Linear(8, 3)

    def attend(self, x, bias):
        q, k, v = unbind(self.qkv(x).reshape(*x.shape[:2], 3, 2, 4), 2)
        return memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2)

    def forward(self, x):
        x = x + self.attend(x, None)
        x = x + self.attend(x, xformers.ops.LowerTriangularMask())
        far = torch.arange(x.shape[1], dtype=x.dtype)
        bias = -(far[:, None] - far).abs().expand(x.shape[0], 2, -1, -1)
        x = x + self.attend(x, bias)
        x = self.norm(x + self.swiglu(x))
        whole = [x[:1], x[1:2, ::2].contiguous()]
        blocks, joined = fmha.BlockDiagonalMask.from_tensor_list(whole)
        first, second = blocks.split(self.attend(joined, blocks.make_local_attention(3)))
        return self.out(x), first.sum(1), second
"""


def test_a_model_that_imports_xformers_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {
        "qkv": nn.Linear(8, 24),
        "swiglu": ops.SwiGLU(8, 12),
        "norm": ops.RMSNorm(8),
        "out": nn.Linear(8, 3),
    }
    checkpoint, model = saved_with(CODE, **parts)
    verified(tmp_path / "b", (checkpoint, model), ["x:[2,length,8]"], ["xformers"])


MASKED = """
import xformers.ops
from torch import nn
from xformers.ops.fmha import BlockDiagonalMask


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kv = nn.Linear(4, 8)

    def forward(self, x, y, mask):
        kept = y.masked_select(mask[..., None] != 0).view(1, -1, 4)
        k, v = self.kv(kept).view(1, -1, 2, 2, 2).unbind(2)
        bias = BlockDiagonalMask.from_seqlens([x.shape[1]] * x.shape[0], mask.sum(1).tolist())
        q = x.reshape(1, -1, 2, 2)
        return xformers.ops.memory_efficient_attention(q, k, v, attn_bias=bias).view_as(x)
"""


@pytest.mark.parametrize("kept", ["some", "none"])
def test_lengths_of_blocks_may_be_values(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]], kept: str
) -> None:
    """As PixArt attends to those tokens of a caption that its mask has."""
    formats, bound = (["torchscript", "onnx"], 2) if kept == "some" else (["onnx"], 1)
    runtimes = ["eager", "torchscript", "onnxruntime"] if kept == "some" else ["onnxruntime"]
    torch.manual_seed(0)
    checkpoint, model = saved_with(MASKED, kv=nn.Linear(4, 8))
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=parse_inputs(["x:[2,3,4]", "y:[2,length,4]", f"mask:int64[2,length]<{bound}"]),
        format=formats,
    )
    report = api.verify(bundle.folder, model=model, runtime=runtimes)
    assert report.exit_code() == 0, report.failures()
    ways = {(row.runtime, row.program) for row in report.results if row.verdict == "pass"}
    for runtime in runtimes:
        assert {(runtime, "forward"), (runtime, "gradient")} <= ways
