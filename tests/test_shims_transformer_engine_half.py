"""The stand-in for Transformer Engine in half types: rounded where the package rounds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.test_shims_transformer_engine import EPS, act, drawn, normed
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention import rope


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_where_the_package_rounds(dtype: torch.dtype) -> None:
    """The norm in float32, its result, both products and the activation rounded once each."""
    layer = drawn(te.LayerNormMLP(64, 32, zero_centered_gamma=True, activation="swiglu", eps=EPS))
    layer = layer.to(dtype)
    x = rand(5, 64).to(dtype)
    own = {name: p.double() for name, p in layer.named_parameters()}

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    norm = rounded(normed(x.double(), own["layer_norm_weight"], own["layer_norm_bias"], 1.0))
    inner = rounded(act("swiglu", rounded(norm @ own["fc1_weight"].T + own["fc1_bias"])))
    expected = inner @ own["fc2_weight"].T + own["fc2_bias"]
    out = layer(x)
    assert out.dtype == dtype
    scale = expected.abs().max()
    close(out.double() / scale, expected / scale, 2 * torch.finfo(dtype).eps)
    alone = te.LayerNorm(64, eps=EPS, params_dtype=dtype)
    wide = normed(rand(5, 64).to(dtype).double(), alone.weight.double(), alone.bias.double())
    assert alone(wide).dtype == dtype


def test_dtypes_are_one_outside_of_autocast() -> None:
    layer = te.LayerNormLinear(6, 4)
    with pytest.raises(TypeError, match=r"layer_norm_weight is torch\.float32"):
        layer(rand(2, 6).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rand(2, 6).float()).dtype == torch.bfloat16
        assert te.RMSNorm(6)(rand(2, 6).float()).dtype == torch.bfloat16


def test_autocast_rounds_the_weights_too() -> None:
    x = rand(5, 6).float()
    for layer in (
        te.LayerNormLinear(6, 4, normalization="RMSNorm"),
        te.LayerNormMLP(6, 8, activation="geglu"),
        te.LayerNorm(6),
        te.TransformerLayer(6, 8, 2, num_gqa_groups=1, hidden_dropout=0.0),
    ):
        layer = drawn(layer).float()
        given = x if not isinstance(layer, te.TransformerLayer) else x[:, None]
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(given)
        assert torch.equal(out, layer.bfloat16()(given.bfloat16()))


def test_a_bias_is_added_to_the_rounded_product_where_rows_are_divided() -> None:
    """257 is none of bfloat16's numbers: 256 + 1 is 256 there, and that + 1 as well."""
    x, weight, bias = (torch.tensor(n).bfloat16() for n in ([[256.0, 1.0]], [[1.0, 1.0]], [1.0]))
    for mode, expected in ((None, 258.0), ("column", 258.0), ("row", 256.0)):
        layer = te.Linear(2, 1, parallel_mode=mode)
        layer.load_state_dict({"weight": weight, "bias": bias}, assign=True)
        assert layer(x).item() == expected
    for divided, expected in ((False, 258.0), (True, 256.0)):
        mlp = te.LayerNormMLP(
            1, 2, 0.0, normalization="RMSNorm", activation="relu", set_parallel_mode=divided
        )
        values = {"layer_norm_weight": [1.0], "fc1_weight": [[256.0], [1.0]], "fc1_bias": [0.0] * 2}
        state = {name: torch.tensor(value).bfloat16() for name, value in values.items()}
        mlp.load_state_dict({**state, "fc2_weight": weight, "fc2_bias": bias}, assign=True)
        assert mlp(x[:, :1]).item() == expected


@pytest.mark.parametrize("fused", [True, False])
def test_what_gelu_is_of_is_not_rounded(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", "0")
    layer = drawn(te.LayerNormMLP(64, 64)).bfloat16()
    nn.init.eye_(layer.fc2_weight)
    nn.init.zeros_(layer.fc2_bias)
    x = rand(5, 64).bfloat16()
    norm = F.layer_norm(
        x.float(), (64,), layer.layer_norm_weight.float(), layer.layer_norm_bias.float()
    )
    product = norm.bfloat16() @ layer.fc1_weight.T
    ways = {
        True: product.double() + layer.fc1_bias.double(),
        False: F.linear(norm.bfloat16(), layer.fc1_weight, layer.fc1_bias).double(),
    }
    found = layer(x).double()
    errors = {
        way: (found - act("gelu", x).bfloat16().double()).abs().sum() for way, x in ways.items()
    }
    assert errors[fused] < 0.05 * errors[not fused]


def test_sines_are_rounded_where_the_embedding_is_not_fused() -> None:
    freqs = te.RotaryPositionEmbedding(32)(50)
    angle = freqs[:, 0, 0, :16].double()
    x = torch.ones(50, 1, 1, 32).bfloat16()
    for fused in (True, False):
        cos, sin = angle.cos(), angle.sin()
        if not fused:
            cos, sin = cos.float().bfloat16().double(), sin.float().bfloat16().double()
        expected = torch.cat([cos - sin, cos + sin], -1).bfloat16()
        found = rope.apply_rotary_pos_emb(x, freqs, fused=fused)[:, 0, 0]
        assert (found != expected).sum() <= 2  # ties


def test_a_residual_is_added_to_what_is_not_rounded() -> None:
    layer = drawn(te.TransformerLayer(64, 64, 2, attn_input_format="bshd")).bfloat16()
    x = rand(2, 5, 64).bfloat16()
    out, bias = layer.self_attention(x)
    hidden = (x.float() + (out.float() + bias.float())).bfloat16()
    out, bias = layer.layernorm_mlp(hidden)
    assert torch.equal(layer(x), (hidden.float() + (out.float() + bias.float())).bfloat16())
