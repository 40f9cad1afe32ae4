"""The stand-in for Transformer Engine: attention with projections, and layers of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fuseport.exporter import shims
from fuseport.tests.test_shims_transformer_engine import EPS, act, drawn, normed, same
from fuseport.tests.test_shims_transformer_engine_attention import (
    attention,
    heads_last,
    padding,
    turned,
)
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import transformer_engine.pytorch as te


def rows_of(layer: Any, names: list[str], x: Tensor) -> list[Tensor]:
    """x by several weights of a layer, with biases where there are."""
    own = dict(layer.named_parameters())
    shift = {name: own.get(name.replace("weight", "bias"), torch.zeros(())) for name in names}
    return [x @ own[name].T + shift[name] for name in names]


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("norm", ["L2Normalization", "RMSNorm", "LayerNorm", None])
@pytest.mark.parametrize("weights", ["three", "one", "interleaved"])
def test_attention_to_itself(weights: str, norm: str | None, order: str) -> None:
    layer = drawn(
        te.MultiheadAttention(
            8,
            4,
            6,
            num_gqa_groups=2,
            input_layernorm=True,
            layernorm_epsilon=EPS,
            fuse_qkv_params=weights != "three",
            qkv_weight_interleaved=weights == "interleaved",
            qkv_format=order,
            qk_norm_type=norm,
            qk_norm_eps=EPS,
            qk_norm_before_rope=norm == "RMSNorm",
            rotary_pos_interleaved=weights == "interleaved",
            return_layernorm_output=True,
            return_bias=True,
        )
    )
    x = rand(2, 5, 8).requires_grad_()
    first = layer.layernorm_qkv
    inner = normed(x, first.layer_norm_weight, first.layer_norm_bias)
    if weights == "three":
        q, k, v = rows_of(first, ["query_weight", "key_weight", "value_weight"], inner)
    else:
        (whole,) = rows_of(first, ["weight"], inner)
        if weights == "one":
            q, k, v = whole.split([24, 12, 12], -1)
        else:  # of each group two heads of queries, one of keys, one of values
            groups = whole.view(2, 5, 2, 4, 6)
            q, k, v = groups[:, :, :, :2], groups[:, :, :, 2], groups[:, :, :, 3]
    q, k, v = q.reshape(2, 5, 4, 6), k.reshape(2, 5, 2, 6), v.reshape(2, 5, 2, 6)

    def scaled(x: Tensor, of: Any) -> Tensor:
        if norm == "L2Normalization":
            return x / torch.sqrt((x * x).sum(-1, keepdim=True) + EPS)
        return normed(x, of.weight, getattr(of, "bias", None))

    interleaved = weights == "interleaved"
    freqs = te.RotaryPositionEmbedding(6, interleaved=interleaved).double()(5)
    angle = freqs[:, 0, :, ::2] if interleaved else freqs[:, 0, :, :3]
    if norm == "RMSNorm":
        q, k = scaled(q, layer.q_norm), scaled(k, layer.k_norm)
    q, k = turned(q, angle, interleaved), turned(k, angle, interleaved)
    if norm in ("L2Normalization", "LayerNorm"):
        q, k = scaled(q, layer.q_norm), scaled(k, layer.k_norm)
    expected = attention(q, k, v, torch.ones(5, 5).tril().bool().expand(2, 5, 5))
    expected = expected @ layer.proj.weight.T
    out, bias, found = layer(heads_last(x, order), rotary_pos_emb=freqs)
    close(heads_last(found, order), inner)
    close(bias, layer.proj.bias)
    leaves = [x, *(p for n, p in layer.named_parameters() if n != "proj.bias")]
    same(heads_last(out, order), expected, leaves)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("weights", ["two", "one", "interleaved"])
def test_attention_to_another(weights: str, normalised: bool) -> None:
    layer = drawn(
        te.MultiheadAttention(
            8,
            4,
            num_gqa_groups=2,
            attention_type="cross",
            attn_mask_type="padding",
            input_layernorm=normalised,
            layernorm_epsilon=EPS,
            fuse_qkv_params=weights != "two",
            qkv_weight_interleaved=weights == "interleaved",
        )
    )
    x, y = rand(3, 2, 8).requires_grad_(), rand(5, 2, 8).requires_grad_()
    first = layer.layernorm_query if normalised else layer.query_layer
    inner = normed(x, first.layer_norm_weight, first.layer_norm_bias) if normalised else x
    name = "query_weight" if weights == "two" and normalised else "weight"
    (q,) = rows_of(first, [name], inner)
    if weights == "two":
        k, v = rows_of(layer.key_value, ["key_weight", "value_weight"], y)
    else:
        (whole,) = rows_of(layer.key_value, ["weight"], y)
        k, v = whole.split(4, -1)
        if weights == "interleaved":
            k, v = whole.view(5, 2, 2, 2, 2).unbind(3)
    q, k, v = (t.reshape(*t.shape[:2], -1, 2).transpose(0, 1) for t in (q, k, v))
    mask = padding([2, 3], 3), padding([5, 1], 5)
    seen = ~(mask[0].mT | mask[1])[:, 0]
    (expected,) = rows_of(layer.proj, ["weight"], attention(q, k, v, seen))
    same(layer(x, mask, y).transpose(0, 1), expected, [x, y, *layer.parameters()])
    with pytest.raises(ValueError, match="encoder_output is needed"):
        layer(x, mask)
    with pytest.raises(NotImplementedError, match="inference_params keep keys"):
        layer(x, mask, y, inference_params=object())


def mlp(layer: Any, x: Tensor, kind: str = "gelu") -> tuple[Tensor, Tensor]:
    norm = normed(x, layer.layer_norm_weight, getattr(layer, "layer_norm_bias", None))
    inner = act(kind, rows_of(layer, ["fc1_weight"], norm)[0])
    return rows_of(layer, ["fc2_weight"], inner)[0], norm


def attended(layer: Any, x: Tensor, y: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(b, s, d) by a `MultiheadAttention` of four heads, three weights, and a norm or none."""
    norm = x
    first = getattr(layer, "layernorm_qkv", getattr(layer, "layernorm_query", None))
    if first is not None:
        norm = normed(x, first.layer_norm_weight, first.layer_norm_bias)
    if y is None:
        q, k, v = rows_of(first or layer.qkv, ["query_weight", "key_weight", "value_weight"], norm)
    else:
        (q,) = rows_of(first, ["query_weight"], norm)
        k, v = rows_of(layer.key_value, ["key_weight", "value_weight"], y)
    q, k, v = (t.unflatten(-1, (4, -1)) for t in (q, k, v))
    return rows_of(layer.proj, ["weight"], attention(q, k, v, seen.expand(len(x), -1, -1)))[0], norm


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "kind", ["plain", "parallel", "post", "output", "decoder", "decoder post", "decoder output"]
)
def test_a_layer_of_a_transformer(kind: str, bias: bool, drop_path_rate: float) -> None:
    layer = drawn(
        te.TransformerLayer(
            8,
            12,
            4,
            layernorm_epsilon=EPS,
            bias=bias,
            drop_path_rate=drop_path_rate,
            layer_type="decoder" if "decoder" in kind else "encoder",
            parallel_attention_mlp=kind == "parallel",
            apply_residual_connection_post_layernorm="post" in kind,
            output_layernorm="output" in kind,
            attn_input_format="bshd",
        )
    )
    x, y = rand(2, 5, 8).requires_grad_(), rand(2, 3, 8).requires_grad_()
    causal = torch.ones(5, 5).tril().bool()
    out, norm = attended(layer.self_attention, x, None, causal)
    leaves = [x, *layer.parameters()]
    if kind == "parallel":
        expected = x + out + mlp(layer.layernorm_mlp, x)[0]
    else:
        hidden = out + (norm if "post" in kind and "output" not in kind else x)
        if "decoder" in kind:
            leaves.append(y)
            out, norm = attended(layer.inter_attention, hidden, y, torch.ones(5, 3).bool())
            hidden = out + (norm if "post" in kind else hidden)
        out, norm = mlp(layer.layernorm_mlp, hidden)
        expected = out + (norm if "post" in kind else hidden)
    if "output" in kind:
        expected = normed(expected, layer.layernorm.weight, layer.layernorm.bias)
    same(layer(x, encoder_output=y), expected, leaves)


def test_masks_windows_and_lengths_are_handed_on() -> None:
    make = {"layernorm_epsilon": EPS, "layer_type": "decoder", "attn_input_format": "bshd"}
    layer = drawn(
        te.TransformerLayer(
            8,
            12,
            4,
            self_attn_mask_type="padding",
            enc_dec_attn_mask_type="padding",
            window_size=(2, 1),
            enc_dec_window_size=(1, 1),
            enc_dec_bottom_right_diagonal=False,
            **make,
        )
    )
    x, y, of_x, of_y = rand(2, 5, 8), rand(2, 3, 8), [5, 3], [2, 3]
    near = {n: (torch.arange(5)[:, None] - torch.arange(n)).ge(-1) for n in (5, 3)}
    near[5] &= (torch.arange(5)[:, None] - torch.arange(5)).le(2)
    near[3] &= (torch.arange(5)[:, None] - torch.arange(3)).le(1)
    one, other = padding(of_x, 5), padding(of_y, 3)
    to_itself = ~(one.mT | one)[:, 0] & near[5]
    to_other = ~(one.mT | other)[:, 0] & near[3]
    hidden = x + attended(layer.self_attention, x, None, to_itself)[0]
    hidden = hidden + attended(layer.inter_attention, hidden, y, to_other)[0]
    expected = hidden + mlp(layer.layernorm_mlp, hidden)[0]
    close(layer(x, one, encoder_output=y, enc_dec_attn_mask=(one, other)), expected)
    starts = [torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (of_x, of_y)]
    close(layer(x, encoder_output=y, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1]), expected)
    other_way = drawn(te.TransformerLayer(8, 12, 4, **make))
    other_way.load_state_dict(layer.state_dict())
    masks: dict[str, Any] = {"self_attn_mask_type": "padding", "enc_dec_attn_mask_type": "padding"}
    windows: dict[str, Any] = {"window_size": (2, 1), "enc_dec_window_size": (1, 1)}
    found = other_way(
        x,
        one,
        encoder_output=y,
        enc_dec_attn_mask=(one, other),
        enc_dec_bottom_right_diagonal=False,
        **masks,
        **windows,
    )
    close(found, expected)


def test_a_layer_over_sequences_that_follow_one_another() -> None:
    make = {"self_attn_mask_type": "padding_causal", "num_gqa_groups": 2, "fuse_qkv_params": True}
    layer = drawn(te.TransformerLayer(8, 12, 4, attn_input_format="thd", **make))
    each = drawn(te.TransformerLayer(8, 12, 4, attn_input_format="bshd", **make))
    each.load_state_dict(layer.state_dict())
    x, freqs = rand(7, 8), te.RotaryPositionEmbedding(2).double()(7)
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    found = layer(x, cu_seqlens_q=starts, max_seqlen_q=4, rotary_pos_emb=freqs)
    parts = [
        each(part[None], rotary_pos_emb=freqs, self_attn_mask_type="causal")[0]
        for part in (x[:3], x[3:])
    ]
    close(found, torch.cat(parts))


def test_options_of_layers_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="parallel_attention_mlp is of encoders"):
        te.TransformerLayer(8, 12, 4, parallel_attention_mlp=True, output_layernorm=True)
    with pytest.raises(ValueError, match="it is encoder or decoder"):
        te.TransformerLayer(8, 12, 4, layer_type="both")
    with pytest.raises(ValueError, match="heads do not fit 3"):
        te.DotProductAttention(4, 8, 3)
    with pytest.raises(ValueError, match="attn_mask_type is 'none'"):
        te.DotProductAttention(4, 8, attn_mask_type="none")
    assert te.DotProductAttention(4, 8, attn_mask_type="causal,padding").attn_mask_type == (
        "padding_causal"
    )
    with pytest.raises(ValueError, match="window_size is"):
        te.DotProductAttention(4, 8, attn_mask_type="no_mask", window_size=(-1, 3))
    with pytest.raises(NotImplementedError, match="score_mod is a graph"):
        te.DotProductAttention(4, 8)(*[rand(2, 2, 4, 8)] * 3, score_mod=lambda *_: None)


def test_torchs_layer_is_the_same() -> None:
    """As the package's own tests compare it: one layer of torch's with its weights put in."""
    layer = drawn(te.TransformerLayer(8, 12, 4, activation="relu", attn_input_format="bshd"))
    theirs = nn.TransformerEncoderLayer(8, 4, 12, norm_first=True, batch_first=True).double().eval()
    qkv, last = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    parts = ["query", "key", "value"]
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([getattr(qkv, f"{p}_weight") for p in parts]),
            "self_attn.in_proj_bias": torch.cat([getattr(qkv, f"{p}_bias") for p in parts]),
            "self_attn.out_proj.weight": layer.self_attention.proj.weight,
            "self_attn.out_proj.bias": layer.self_attention.proj.bias,
            "linear1.weight": last.fc1_weight,
            "linear1.bias": last.fc1_bias,
            "linear2.weight": last.fc2_weight,
            "linear2.bias": last.fc2_bias,
            "norm1.weight": qkv.layer_norm_weight,
            "norm1.bias": qkv.layer_norm_bias,
            "norm2.weight": last.layer_norm_weight,
            "norm2.bias": last.layer_norm_bias,
        }
    )
    x = rand(2, 5, 8)
    mask = torch.ones(5, 5).triu(1).bool()
    close(layer(x), theirs(x, src_mask=mask))


def test_transformers_llama_is_the_same() -> None:
    """With grouped heads, rotary embeddings, RMS norms and SwiGLU; values and gradients."""
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=EPS,
        attn_implementation="eager",
    )
    theirs = drawn(LlamaDecoderLayer(config, 0))
    layer = drawn(
        te.TransformerLayer(
            16,
            24,
            4,
            num_gqa_groups=2,
            layernorm_epsilon=EPS,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
        )
    )
    own = theirs.state_dict()
    qkv, last = "self_attention.layernorm_qkv", "layernorm_mlp"
    layer.load_state_dict(
        {
            f"{qkv}.layer_norm_weight": own["input_layernorm.weight"],
            f"{qkv}.query_weight": own["self_attn.q_proj.weight"],
            f"{qkv}.key_weight": own["self_attn.k_proj.weight"],
            f"{qkv}.value_weight": own["self_attn.v_proj.weight"],
            "self_attention.proj.weight": own["self_attn.o_proj.weight"],
            f"{last}.layer_norm_weight": own["post_attention_layernorm.weight"],
            f"{last}.fc1_weight": torch.cat([own[f"mlp.{n}_proj.weight"] for n in ("gate", "up")]),
            f"{last}.fc2_weight": own["mlp.down_proj.weight"],
        }
    )
    x = rand(2, 5, 16).requires_grad_()
    freqs = te.RotaryPositionEmbedding(4).double()(7)
    angles = freqs[None, :5, 0, 0]
    mask = torch.full((5, 5), -torch.inf).double().triu(1)[None, None]
    expected = theirs(x, mask, position_embeddings=(angles.cos(), angles.sin()))
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = layer(x, rotary_pos_emb=freqs)
    close(found, expected, 1e-5)  # its norms are computed in float32
    keys = layer.self_attention.layernorm_qkv.key_weight, theirs.self_attn.k_proj.weight
    cotangent = rand(*x.shape)
    for one, other in zip(
        torch.autograd.grad(found, [x, keys[0]], cotangent),
        torch.autograd.grad(expected, [x, keys[1]], cotangent),
        strict=True,
    ):
        close(one, other, 1e-4)
