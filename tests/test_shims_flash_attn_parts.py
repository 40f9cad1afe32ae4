"""Rotary embeddings, norms, MLPs and losses of the stand-in for flash_attn, by definitions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.test_shims_flash_attn import packed, same_gradients, turned
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    from flash_attn.layers import rotary
    from flash_attn.losses.cross_entropy import CrossEntropyLoss
    from flash_attn.modules import mlp
    from flash_attn.ops import activations, fused_dense, layer_norm, rms_norm
    from flash_attn.ops.triton import layer_norm as triton_norm
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.rotary import apply_rotary


@pytest.mark.parametrize("shift", [0, 2, torch.tensor([1, 0, 4])], ids=str)
def test_packed_sequences_have_steps_of_their_own(shift: Any) -> None:
    x, table, starts = rand(7, 2, 4), rand(9, 2), packed([3, 0, 2])
    firsts = [shift] * 3 if isinstance(shift, int) else shift.tolist()
    steps = [*range(firsts[0], firsts[0] + 3), firsts[2], firsts[2] + 1]
    out = rotary.apply_rotary_emb(
        x, table.cos(), table.sin(), cu_seqlens=starts, max_seqlen=3, seqlen_offsets=shift
    )
    close(out[:5], turned(x[:5], table[steps], False))


def test_only_the_kernel_writes_in_place() -> None:
    x, table = rand(2, 4, 3, 8), rand(4, 4)
    before, expected = x.clone(), turned(x, table, False)
    close(rotary.apply_rotary_emb(x, table.cos(), table.sin(), inplace=True), expected)
    close(x, before)
    assert apply_rotary(x, table.cos(), table.sin(), inplace=True) is x
    close(x, expected)
    narrow = x.to(torch.bfloat16)
    assert apply_rotary(narrow, table.cos().float(), table.sin().float()).dtype == torch.bfloat16


def test_queries_and_keys_are_turned_and_values_are_not() -> None:
    table, other = rand(6, 2), rand(6, 2)
    qkv = rand(2, 5, 3, 2, 4)
    args = (table.cos(), table.sin(), other.cos(), other.sin())
    out = rotary.apply_rotary_emb_qkv_(qkv, *args, seqlen_offsets=1)
    close(out[:, :, 0], turned(qkv[:, :, 0], table[1:], False))
    close(out[:, :, 1], turned(qkv[:, :, 1], other[1:], False))
    close(out[:, :, 2], qkv[:, :, 2])
    grouped = rand(2, 5, 6, 4)
    found = rotary.apply_rotary_emb_qkv_(grouped, *args[:2], num_heads_q=4)
    close(found[:, :, :5], turned(grouped[:, :, :5], table[:5], False))
    close(found[:, :, 5], grouped[:, :, 5])
    kv = rotary.apply_rotary_emb_kv_(qkv[:, :, 1:], *args[:2], seqlen_offsets=1)
    close(kv[:, :, 0], turned(qkv[:, :, 1], table[1:], False))
    close(kv[:, :, 1], qkv[:, :, 2])
    with pytest.raises(ValueError, match="num_heads_q"):
        rotary.apply_rotary_emb_qkv_(grouped, *args[:2])


@pytest.mark.parametrize("scale_base", [None, 8.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_tables_are_those_of_the_paper(interleaved: bool, scale_base: float | None) -> None:
    layer = rotary.RotaryEmbedding(6, 100.0, interleaved, scale_base)
    assert list(layer.state_dict()) == []
    assert {"inv_freq", "scale"} == {name for name, _ in layer.named_buffers()} | {"scale"}
    layer.double()
    steps = torch.arange(7).double()
    angles = steps[:, None] * 100.0 ** (-torch.arange(0, 6, 2).double() / 6)
    qkv = rand(2, 5, 3, 2, 8)
    out = layer(qkv, seqlen_offset=2)
    factor = torch.ones(7, 3).double()
    if scale_base is not None:
        powers = (steps - 3) / scale_base
        factor = ((torch.arange(0, 6, 2) + 2.4) / 8.4).double() ** powers[:, None]
    wide = torch.cat([factor, factor], -1) if not interleaved else factor.repeat_interleave(2, -1)
    wide = torch.cat([wide, torch.ones(7, 2).double()], -1)[2:, None]
    q, k, v = qkv.unbind(2)
    close(out[:, :, 0], turned(q, angles[2:], interleaved) * wide, 1e-6)
    close(out[:, :, 1], turned(k, angles[2:], interleaved) / wide, 1e-6)
    close(out[:, :, 2], v)
    found_q, found_kv = layer(q, qkv[:, :, 1:], seqlen_offset=2)
    close(torch.cat([found_q[:, :, None], found_kv], 2), out)
    shifted = layer(qkv, seqlen_offset=torch.tensor([2, 2]), max_seqlen=7)
    close(shifted, out)
    assert layer._cos_cached.shape == (7, 3)
    assert layer._seq_len_cached == 7
    with pytest.raises(ValueError, match="max_seqlen"):
        layer(qkv, seqlen_offset=torch.tensor([2, 2]))
    half = layer.to(torch.bfloat16)
    half(qkv.bfloat16(), seqlen_offset=2)
    if scale_base is None:
        close(half._cos_cached.float(), angles.cos().float(), 1e-2)


def test_norms_of_sums() -> None:
    x0, x1, residual = rand(2, 3, 8), rand(2, 3, 8), rand(2, 3, 8)
    weight, bias, other = rand(8), rand(8), rand(8)
    rows, channels = rand(2, 3), rand(8)
    total = x0 * rows[..., None] * channels + residual
    args = (x0, residual, weight, bias, 0.0, 1e-5, rows, channels)
    found, kept = layer_norm.dropout_add_layer_norm(*args, prenorm=True)
    close(found, F.layer_norm(total, (8,), weight, bias))
    close(kept, total)
    by_root = F.rms_norm(total, (8,), weight, 1e-5) + bias
    close(rms_norm.dropout_add_rms_norm(*args), by_root)
    close(rms_norm.rms_norm(total, weight, 1e-5), by_root - bias)
    both = x0 + x1 + residual
    for norm, function in (
        (
            lambda w: F.layer_norm(both, (8,), w),
            layer_norm.dropout_add_layer_norm_parallel_residual,
        ),
        (
            lambda w: F.rms_norm(both, (8,), w, 1e-5),
            rms_norm.dropout_add_rms_norm_parallel_residual,
        ),
    ):
        given = (x0, x1, residual, weight, None, other, None, 0.0, 1e-5)
        first, second, kept = function(*given, prenorm=True)
        close(first, norm(weight))
        close(second, norm(other))
        close(kept, both)
        alone = function(x0, x1, residual, weight, None, None, None, 0.0, 1e-5)
        close(alone[0], norm(weight))
        assert alone[1] is None
    close(layer_norm.layer_norm(x0, weight, bias, 1e-5), F.layer_norm(x0, (8,), weight, bias))
    with pytest.raises(NotImplementedError, match="leaves out no rows"):
        layer_norm.dropout_add_layer_norm_subset(x0)
    with pytest.raises(NotImplementedError, match="leaves out no rows"):
        rms_norm.dropout_add_rms_norm_subset(x0)


def test_norms_as_modules() -> None:
    x, residual = rand(2, 3, 8), rand(2, 3, 8)
    by_mean = layer_norm.DropoutAddLayerNorm(8, prenorm=True, p=0.5).double().eval()
    by_root = rms_norm.DropoutAddRMSNorm(8).double()
    assert list(by_mean.state_dict()) == ["weight", "bias"]
    assert list(by_root.state_dict()) == ["weight"]
    close(by_mean(x, residual)[0], F.layer_norm(x + residual, (8,)))
    close(by_root(x, residual), F.rms_norm(x + residual, (8,), eps=1e-5))
    plain, centered = rms_norm.RMSNorm(8), triton_norm.RMSNorm(8, zero_centered_weight=True)
    assert list(plain.state_dict()) == list(centered.state_dict()) == ["weight"]
    assert (centered.weight == 0).all()
    expected = F.rms_norm(x, (8,), eps=1e-5)
    close(plain.double()(x), expected)
    out, kept = centered.double()(x, residual, prenorm=True)
    close(out, F.rms_norm(x + residual, (8,), eps=1e-5))
    close(kept, x + residual)
    weight = rand(8)
    found = triton_norm.layer_norm_fn(x, weight - 1, None, eps=1e-5, zero_centered_weight=True)
    close(found, F.layer_norm(x, (8,), weight))
    for extra in ({"out": x}, {"out_dtype": torch.float16}, {"return_dropout_mask": True}):
        with pytest.raises(NotImplementedError, match="layer_norm_fn"):
            triton_norm.rms_norm_fn(x, weight, None, **extra)


def test_activations_and_their_gradients() -> None:
    x, g, bias = rand(3, 4).requires_grad_(), rand(3, 4), rand(4)
    for forward, backward, expected in (
        (activations.gelu_fwd, activations.gelu_bwd, F.gelu(x, approximate="tanh")),
        (F.relu, activations.relu_bwd, F.relu(x)),
    ):
        close(forward(x), expected)
        close(backward(g, x), torch.autograd.grad(expected, x, g)[0])
    narrow = x.detach().requires_grad_()
    squares = activations.sqrelu_fwd(narrow)
    close(squares, F.relu(narrow) ** 2, 1e-6)
    close(activations.sqrelu_bwd(g, narrow), torch.autograd.grad(squares, narrow, g)[0], 1e-6)
    close(activations.bias_gelu(x, bias), F.gelu(x + bias, approximate="tanh"))
    close(activations.swiglu(x, g), F.silu(x) * g)


def test_linear_layers_and_mlps() -> None:
    x = rand(2, 3, 8)
    dense = fused_dense.FusedDense(8, 5, return_residual=True).double()
    y, same = dense(x)
    close(y, F.linear(x, dense.weight, dense.bias))
    assert same is x
    four = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    for name, activation in (("gelu_approx", activations.gelu_fwd), ("relu", F.relu)):
        fused = mlp.FusedMLP(8, activation=name).double()
        assert list(fused.state_dict()) == four
        close(fused(x), fused.fc2(activation(fused.fc1(x))))
    plain = mlp.Mlp(8, 12, 4, return_residual=True).double()
    assert list(plain.state_dict()) == four
    close(plain(x)[0], plain.fc2(F.gelu(plain.fc1(x))))
    for activation in (F.sigmoid, F.silu, F.gelu):
        gated = mlp.GatedMlp(8, 12, activation=activation, bias1=False, multiple_of=8).double()
        assert list(gated.state_dict()) == ["fc1.weight", "fc2.weight", "fc2.bias"]
        assert gated.fc1.weight.shape == (32, 8)
        a, b = gated.fc1(x).split(16, -1)
        close(gated(x), gated.fc2(a * activation(b)))
    for name in ("ColumnParallelLinear", "RowParallelLinear", "ParallelFusedMLP"):
        with pytest.raises(NotImplementedError, match=rf"{name}.*several devices"):
            getattr(fused_dense, name)(8, 8, None)
    with pytest.raises(NotImplementedError, match="several devices"):
        mlp.ParallelGatedMlp(8)
    with pytest.raises(NotImplementedError, match="process group"):
        fused_dense.fused_dense_func(x, dense.weight, process_group=object())
    with pytest.raises(ValueError, match=r"'tanh'.*gelu_approx"):
        fused_dense.FusedMLP(8, activation="tanh")


def test_cross_entropy() -> None:
    logits, labels = rand(5, 7).requires_grad_(), torch.tensor([0, -100, 6, 3, 3])
    options: dict[str, Any] = {"label_smoothing": 0.1, "logit_scale": 0.5}
    losses, squares = cross_entropy_loss(logits, labels, lse_square_scale=0.01, **options)
    z = (0.5 * logits).logsumexp(-1) ** 2 * 0.01 * (labels >= 0)
    expected = F.cross_entropy(0.5 * logits, labels, reduction="none", label_smoothing=0.1)
    close(losses, expected + z)
    close(squares, z)
    same_gradients(losses, expected + z, [logits])
    assert not squares.requires_grad
    for reduction in ("mean", "sum"):
        loss = CrossEntropyLoss(reduction=reduction)
        close(loss(logits, labels), F.cross_entropy(logits, labels, reduction=reduction))
    whole = CrossEntropyLoss(lse_square_scale=0.01, return_z_loss=True, **options)
    close(torch.stack(whole(logits, labels)), torch.stack([(expected + z).sum(), z.sum()]) / 4)
    half = CrossEntropyLoss(reduction="none")(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    with pytest.raises(NotImplementedError, match="reduction"):
        CrossEntropyLoss(reduction="median")


CROSS = """
import torch
from flash_attn import flash_attn_varlen_func
from flash_attn.bert_padding import unpad_input
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x, y, mask):
        batch, length, _ = x.shape
        q = self.q(x).unflatten(-1, (2, 4)).flatten(0, 1)
        kv, _, of_k, longest, *_ = unpad_input(self.kv(y).unflatten(-1, (2, 2, 4)), mask)
        of_q = torch.arange(batch + 1, dtype=torch.int32) * length
        out = flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], of_q, of_k, length, longest)
        return out.unflatten(0, (batch, length)).flatten(-2)
"""


def test_attention_to_no_keys_at_all_has_no_gradient_in_onnxruntime(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """A product over none of them gave what was in its memory."""
    torch.manual_seed(0)
    checkpoint, model = saved_with(CROSS, q=nn.Linear(8, 8), kv=nn.Linear(8, 16))
    shapes = "x:[batch,l,8],y:[batch,m,8],mask:int64[batch,m]<2"
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=parse_inputs([shapes]),
        format="onnx",
        programs="gradient",
    )
    session = onnxruntime.InferenceSession(bundle.folder / "gradient.onnx")
    names = [output.name for output in session.get_outputs()]
    for kept in (1, 0, 1, 0):
        feed = {
            "x": torch.randn(2, 3, 8).numpy(),
            "y": torch.randn(2, 5, 8).numpy(),
            "mask": torch.full((2, 5), kept).numpy(),
            "cotangent_output": torch.randn(2, 3, 8).numpy(),
        }
        results = dict(zip(names, session.run(None, feed), strict=True))
        assert {bool(value.any()) for value in results.values()} == {bool(kept)}
