"""The stand-in for Transformer Engine: names, norms, linear layers and MLPs by definitions."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.attention.inference import PagedKVCacheManager
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.optimizers import FusedAdam

EPS = 0.1
EXTRA = "_extra_state"
GATED_BY = {
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
    "qgeglu": "qgelu",
    "sreglu": "srelu",
    "glu": "sigmoid",
}


def drawn(layer: nn.Module) -> Any:
    """A layer in float64, in eval mode, with parameters that are all drawn at random."""
    layer = layer.double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def same(found: Any, expected: Any, leaves: Sequence[Tensor]) -> None:
    """Values, and gradients of `leaves`."""
    close(found, expected)
    cotangent = rand(*expected.shape)
    pair = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (found, expected)]
    for one, other in zip(*pair, strict=True):
        close(one, other)


def names(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a state dict, without those of `_extra_state`."""
    state = layer.state_dict().items()
    return {name: tuple(t.shape) for name, t in state if not name.endswith(EXTRA)}


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, shift: float = 0.0) -> Tensor:
    """The layer norm of the last dimension, or the RMS norm where there is no bias."""
    centred = x if bias is None else x - x.sum(-1, keepdim=True) / x.shape[-1]
    spread = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
    out = centred / torch.sqrt(spread + EPS) * (weight + shift)
    return out if bias is None else out + bias


# By what the package's constructors register: a layer, and what is in its state dict.
LAYERS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "LayerNorm": (lambda: te.LayerNorm(6), {"weight": (6,), "bias": (6,)}),
    "RMSNorm": (lambda: te.RMSNorm(hidden_size=6), {"weight": (6,)}),
    "Linear": (lambda: te.Linear(6, 4), {"weight": (4, 6), "bias": (4,)}),
    "Linear without bias": (lambda: te.Linear(6, 4, bias=False), {"weight": (4, 6)}),
    "Linear of named parts": (
        lambda: te.Linear(6, 4, parameters_split=("a", "b_")),
        {"a_weight": (2, 6), "b_weight": (2, 6), "a_bias": (2,), "b_bias": (2,)},
    ),
    "Linear of parts": (
        lambda: te.Linear(6, 4, parameters_split={"a": 1, "b": 3}, bias=False),
        {"a_weight": (1, 6), "b_weight": (3, 6)},
    ),
    "LayerNormLinear": (
        lambda: te.LayerNormLinear(6, 4),
        {"layer_norm_weight": (6,), "layer_norm_bias": (6,), "weight": (4, 6), "bias": (4,)},
    ),
    "LayerNormLinear with RMSNorm": (
        lambda: te.LayerNormLinear(6, 4, normalization="RMSNorm", bias=False),
        {"layer_norm_weight": (6,), "weight": (4, 6)},
    ),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(6, 8),
        {
            "layer_norm_weight": (6,),
            "layer_norm_bias": (6,),
            "fc1_weight": (8, 6),
            "fc1_bias": (8,),
            "fc2_weight": (6, 8),
            "fc2_bias": (6,),
        },
    ),
    "LayerNormMLP with a gate": (
        lambda: te.LayerNormMLP(6, 8, activation="swiglu", normalization="RMSNorm", bias=False),
        {"layer_norm_weight": (6,), "fc1_weight": (16, 6), "fc2_weight": (6, 8)},
    ),
    "DotProductAttention": (lambda: te.DotProductAttention(4, 8), {}),
    "DotProductAttention with a sink": (
        lambda: te.DotProductAttention(4, 8, softmax_type="learnable"),
        {"softmax_offset": (4,)},
    ),
    "MultiheadAttention": (
        lambda: te.MultiheadAttention(8, 4, num_gqa_groups=2),
        {
            "qkv.query_weight": (8, 8),
            "qkv.key_weight": (4, 8),
            "qkv.value_weight": (4, 8),
            "qkv.query_bias": (8,),
            "qkv.key_bias": (4,),
            "qkv.value_bias": (4,),
            "proj.weight": (8, 8),
            "proj.bias": (8,),
        },
    ),
    "MultiheadAttention of one weight": (
        lambda: te.MultiheadAttention(
            8, 4, 3, fuse_qkv_params=True, input_layernorm=True, bias=False, qk_norm_type="RMSNorm"
        ),
        {
            "q_norm.weight": (3,),
            "k_norm.weight": (3,),
            "layernorm_qkv.layer_norm_weight": (8,),
            "layernorm_qkv.layer_norm_bias": (8,),
            "layernorm_qkv.weight": (36, 8),
            "proj.weight": (8, 12),
        },
    ),
    "MultiheadAttention to another": (
        lambda: te.MultiheadAttention(8, 4, attention_type="cross", bias=False),
        {
            "query_layer.weight": (8, 8),
            "key_value.key_weight": (8, 8),
            "key_value.value_weight": (8, 8),
            "proj.weight": (8, 8),
        },
    ),
    "TransformerLayer": (
        lambda: te.TransformerLayer(8, 12, 4, bias=False, normalization="RMSNorm"),
        {
            "self_attention.layernorm_qkv.layer_norm_weight": (8,),
            "self_attention.layernorm_qkv.query_weight": (8, 8),
            "self_attention.layernorm_qkv.key_weight": (8, 8),
            "self_attention.layernorm_qkv.value_weight": (8, 8),
            "self_attention.proj.weight": (8, 8),
            "layernorm_mlp.layer_norm_weight": (8,),
            "layernorm_mlp.fc1_weight": (12, 8),
            "layernorm_mlp.fc2_weight": (8, 12),
        },
    ),
    "TransformerLayer with a norm at the end": (
        lambda: te.TransformerLayer(
            8,
            12,
            4,
            bias=False,
            normalization="RMSNorm",
            output_layernorm=True,
            fuse_qkv_params=True,
        ),
        {
            "self_attention.qkv.weight": (24, 8),
            "self_attention.proj.weight": (8, 8),
            "layernorm_mlp.layer_norm_weight": (8,),
            "layernorm_mlp.fc1_weight": (12, 8),
            "layernorm_mlp.fc2_weight": (8, 12),
            "layernorm.weight": (8,),
        },
    ),
    "a decoder's TransformerLayer": (
        lambda: te.TransformerLayer(
            8, 12, 4, bias=False, normalization="RMSNorm", layer_type="decoder"
        ),
        {
            "self_attention.layernorm_qkv.layer_norm_weight": (8,),
            "self_attention.layernorm_qkv.query_weight": (8, 8),
            "self_attention.layernorm_qkv.key_weight": (8, 8),
            "self_attention.layernorm_qkv.value_weight": (8, 8),
            "self_attention.proj.weight": (8, 8),
            "inter_attention.layernorm_query.layer_norm_weight": (8,),
            "inter_attention.layernorm_query.query_weight": (8, 8),
            "inter_attention.key_value.key_weight": (8, 8),
            "inter_attention.key_value.value_weight": (8, 8),
            "inter_attention.proj.weight": (8, 8),
            "layernorm_mlp.layer_norm_weight": (8,),
            "layernorm_mlp.fc1_weight": (12, 8),
            "layernorm_mlp.fc2_weight": (8, 12),
        },
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_have_the_names_and_shapes_of_the_package(name: str) -> None:
    make, expected = LAYERS[name]
    layer = make()
    assert names(layer) == expected
    assert [name for name, _ in layer.named_parameters()] == [*expected]
    extra = {n: tuple(t.shape) for n, t in layer.state_dict().items() if n.endswith(EXTRA)}
    parts = [
        n for n, part in layer.named_modules() if isinstance(part, TransformerEngineBaseModule)
    ]
    assert extra == {f"{part}.{EXTRA}" if part else EXTRA: (0,) for part in parts}
    with torch.device("meta"):
        empty = make()
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert all(
        torch.equal(a, b) for a, b in zip(empty.parameters(), layer.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "extra",
    [torch.empty(0, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8), io.BytesIO(b"x"), None],
    ids=["empty", "bytes", "stream", "none"],
)
def test_scales_of_fp8_are_taken_and_have_no_effect(extra: Any) -> None:
    layer, other = te.TransformerLayer(8, 12, 4), te.TransformerLayer(8, 12, 4)
    state = {n: extra if n.endswith(EXTRA) else t for n, t in layer.state_dict().items()}
    assert sum(n.endswith(EXTRA) for n in state) == 4
    other.load_state_dict(state)
    older = {
        n.replace(f"attention.{EXTRA}", f"attention.fused_attention.{EXTRA}"): t
        for n, t in state.items()
    }
    assert len(older.keys() - state.keys()) == 1
    other.load_state_dict(older)
    other.load_state_dict({n: t for n, t in state.items() if not n.endswith(EXTRA)})
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), layer.parameters(), strict=True)
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({n: t for n, t in state.items() if n.endswith(EXTRA)})


def test_initial_values() -> None:
    torch.manual_seed(0)
    layer = te.LayerNormMLP(
        64, 256, zero_centered_gamma=True, output_layer_init_method=nn.init.ones_
    )
    assert (layer.layer_norm_weight == 0).all()
    assert (layer.fc1_bias == 0).all()
    assert (layer.fc2_weight == 1).all()
    assert 0.022 < layer.fc1_weight.std() < 0.024
    with torch.device("meta"):
        empty = te.LayerNormLinear(64, 256, params_dtype=torch.bfloat16)
    empty.reset_parameters()
    assert (empty.layer_norm_weight == 1).all()
    assert empty.weight.dtype == torch.bfloat16
    assert 0.022 < empty.weight.float().std() < 0.024
    assert te.Linear(4, 4, bias=False).bias.numel() == 0


@pytest.mark.parametrize("shift", [0.0, 1.0], ids=["plain", "zero-centred"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_by_their_definition(kind: str, shift: float) -> None:
    layer = drawn(getattr(te, kind)(6, eps=EPS, zero_centered_gamma=bool(shift)))
    x = rand(2, 3, 6).requires_grad_()
    bias = layer.bias if kind == "LayerNorm" else None
    same(layer(x), normed(x, layer.weight, bias, shift), [x, *layer.parameters()])
    two = drawn(getattr(te, kind)((2, 3), eps=EPS))
    y = x.unflatten(-1, (2, 3))
    bias = two.bias.flatten() if kind == "LayerNorm" else None
    expected = normed(x, two.weight.flatten(), bias).unflatten(-1, (2, 3))
    same(two(y), expected, [x, *two.parameters()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("split", [None, ("a", "b"), {"a": 1, "b": 3}], ids=str)
def test_linear_layers_by_their_definition(split: Any, bias: bool) -> None:
    options = {"parameters_split": split, "bias": bias}
    layer = drawn(te.Linear(6, 4, **options))
    both = drawn(te.LayerNormLinear(6, 4, eps=EPS, **options))
    returning = te.LayerNormLinear(
        6, 4, eps=EPS, return_bias=True, return_layernorm_output=True, **options
    )
    returning.double().load_state_dict(both.state_dict())
    x = rand(2, 3, 6).requires_grad_()

    def product(of: Any, x: Tensor) -> Tensor:
        own = dict(of.named_parameters())
        parts = ["weight"] if split is None else ["a_weight", "b_weight"]
        out = x @ torch.cat([own[name] for name in parts]).T
        shifts = [own[name.replace("weight", "bias")] for name in parts] if bias else []
        return out + torch.cat(shifts) if bias else out

    same(layer(x), product(layer, x), [x, *layer.parameters()])
    norm = normed(x, both.layer_norm_weight, both.layer_norm_bias)
    same(both(x), product(both, norm), [x, *both.parameters()])
    out, shift, found = returning(x)
    close(found, norm)
    close(out if shift is None else out + shift, both(x))
    assert (shift is None) is not bias


def act(name: str, x: Tensor) -> Tensor:
    """Activations by their definitions, those with a gate of both halves."""
    half = x.shape[-1] // 2
    gate, value = x[..., :half], x[..., half:]

    def sigmoid(x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.0)

    if name == "clamped_swiglu":
        gate, value = torch.where(gate > 1.5, 1.5, gate), value.minimum(value * 0 + 1.5)
        return gate * sigmoid(2.0 * gate) * (value.maximum(value * 0 - 1.5) + 0.5)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": gelu,
        "relu": relu,
        "qgelu": lambda x: x * sigmoid(1.702 * x),
        "srelu": lambda x: relu(x) ** 2,
        "silu": lambda x: x * sigmoid(x),
        "sigmoid": sigmoid,
    }
    if name in functions:
        return functions[name](x)
    return functions[GATED_BY[name]](gate) * value


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "name",
    [*GATED_BY, "gelu", "qgelu", "relu", "srelu", "silu", "clamped_swiglu"],
)
def test_an_mlp_by_its_definition(name: str, bias: bool) -> None:
    options: dict[str, Any] = {"activation": name, "bias": bias, "eps": EPS}
    if name == "clamped_swiglu":
        options["activation_params"] = {"limit": 1.5, "alpha": 2.0, "glu_linear_offset": 0.5}
    layer = drawn(te.LayerNormMLP(6, 8, normalization="RMSNorm", **options))
    nn.init.normal_(layer.fc1_weight, std=2.0)  # beyond the limits, both ways
    x = rand(2, 3, 6).requires_grad_()
    norm = normed(x, layer.layer_norm_weight, None)
    shifts = (layer.fc1_bias, layer.fc2_bias) if bias else (0.0, 0.0)
    inner = act(name, norm @ layer.fc1_weight.T + shifts[0])
    expected = inner @ layer.fc2_weight.T + shifts[1]
    same(layer(x), expected, [x, *layer.parameters()])
    returning = te.LayerNormMLP(
        6, 8, normalization="RMSNorm", return_bias=True, return_layernorm_output=True, **options
    )
    returning.double().load_state_dict(layer.state_dict())
    out, shift, found = returning(x)
    close(out if shift is None else out + shift, expected)
    close(found, norm)


def test_fp8_is_off_or_refused() -> None:
    of = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16)
    assert of.delayed()
    assert not of.mxfp8()
    assert recipe.MXFP8BlockScaling().mxfp8()
    layer, x = te.Linear(4, 4), rand(2, 4).float()
    with te.fp8_autocast(enabled=False, fp8_recipe=of), te.autocast(enabled=False, recipe=of):
        assert te.checkpoint(layer, x, use_reentrant=False).shape == (2, 4)
    with te.fp8_model_init(enabled=False), te.onnx_export(enabled=True):
        assert te.Linear(4, 4)(x).shape == (2, 4)
    for name, context in (
        ("fp8_autocast", te.fp8_autocast(enabled=True, fp8_recipe=of)),
        ("autocast", te.autocast()),
        ("quantized_model_init", te.quantized_model_init(enabled=True)),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}.enabled=True.*enabled=False"):
            context.__enter__()
    assert te.is_fp8_available() is False
    assert "dtypes of weights" in te.is_fp8_available(return_reason=True)[1]
    assert not FP8GlobalStateManager.is_fp8_enabled()


def test_what_has_no_form_is_refused_by_name() -> None:
    for make, said in (
        (lambda: te.Linear(4, 4, tp_size=2), "Linear is divided among 2 processes"),
        (lambda: te.TransformerLayer(8, 12, 4, tp_size=4), "TransformerLayer is divided among 4"),
        (lambda: te.GroupedLinear(2, 4, 4), "GroupedLinear multiplies"),
        (lambda: te.InferenceParams(max_batch_size=1), "InferenceParams keeps keys"),
        (lambda: PagedKVCacheManager(), "PagedKVCacheManager keeps keys"),
        (lambda: FusedAdam([]), "FusedAdam trains"),
        (lambda: te.CudaRNGStatesTracker(), "CudaRNGStatesTracker keeps"),
        (lambda: te.LayerNormMLP(4, 4, activation="softplus"), "activation is 'softplus'"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            make()
    assert te.Linear(4, 4, ub_overlap_ag=True, fuse_wgrad_accumulation=True).tp_size == 1
    with pytest.raises(TypeError, match="has no option 'biass'"):
        te.Linear(4, 4, biass=False)
    with pytest.raises(ValueError, match="are not 5 together"):
        te.Linear(4, 5, parameters_split=("a", "b"))
    with pytest.raises(RuntimeError, match="give one of normalized_shape"):
        te.LayerNorm()


CODE = """
import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rope = te.RotaryPositionEmbedding(4)
        self.angles = self.rope(64)
        self.layer = te.TransformerLayer(
            8, 12, 2, normalization="RMSNorm", activation="swiglu", attn_input_format="bshd",
            self_attn_mask_type="padding", fuse_qkv_params=True, device="cuda",
        )
        self.norm = te.LayerNorm(8)
        self.head = te.Linear(8, 3)

    def forward(self, x, lengths):
        step = torch.arange(x.shape[1], device=x.device)
        mask = (step >= lengths[:, None])[:, None, None]
        with te.fp8_autocast(enabled=False, fp8_recipe=DelayedScaling()):
            x = self.layer(x, mask, rotary_pos_emb=(self.rope(x.shape[1]), self.angles))
            return self.head(self.norm(x))
"""


def test_a_model_of_its_layers_is_exported_in_every_format(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {
        "rope": te.RotaryPositionEmbedding(4),
        "layer": te.TransformerLayer(
            8, 12, 2, normalization="RMSNorm", activation="swiglu", fuse_qkv_params=True
        ),
        "norm": te.LayerNorm(8),
        "head": te.Linear(8, 3),
    }
    checkpoint, model = saved_with(CODE, **parts)
    state = torch.load(checkpoint)
    scales = torch.arange(50, dtype=torch.uint8)
    torch.save({n: scales if n.endswith(EXTRA) else t for n, t in state.items()}, checkpoint)
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=parse_inputs(["x:[batch,length,8]", "lengths:int64[batch]<6"]),
    )
    assert bundle.manifest["architecture"]["config"]["shims"][-1] == "transformer_engine"
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    ways = {(row.runtime, row.program) for row in report.results if row.verdict == "pass"}
    for runtime in ("eager", "torchscript", "exported_program", "onnxruntime", "onnx_reference"):
        assert {(runtime, "forward"), (runtime, "gradient")} <= ways
