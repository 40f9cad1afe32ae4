"""The decoder layer: against a plain one in float64, against transformers', and exported."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.program import TensorSpec
from fuseport.ops import register
from fuseport.ops.compositions.transformer_layer import PROJECTIONS, Nf4LoraLinear, TransformerLayer

HIDDEN, BETWEEN, HEADS, KEYS = 24, 40, 6, 2

NET = f"""
from fuseport.ops.compositions.transformer_layer import TransformerLayer

def layer():
    return TransformerLayer({HIDDEN}, {BETWEEN}, {HEADS}, {KEYS}, rank=2, block_size=32)
"""


@pytest.fixture(autouse=True)
def _registered() -> None:
    register("nf4_linear", "rms_norm", "rotary_embedding", "swiglu")


def layer_of(seed: int = 0) -> TransformerLayer:
    """Whose LoRA and norms are as after training."""
    torch.manual_seed(seed)
    layer = TransformerLayer(HIDDEN, BETWEEN, HEADS, KEYS, rank=2, block_size=32)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            shift = 1.0 if name.endswith("layernorm") else 0.0
            parameter.copy_(shift + 0.1 * torch.randn_like(parameter))
    return layer


def merged(linear: Nf4LoraLinear) -> Tensor:
    return linear.weight().to(linear.lora_A.dtype) + linear.scaling * linear.lora_B @ linear.lora_A


def plain(layer: TransformerLayer, x: Tensor) -> Tensor:
    """The layer as its formulas say, attention a masked softmax, rotations complex."""
    weights = {name: merged(linear) for name, linear in layer.projections().items()}
    batch, length, _ = x.shape
    half = layer.head_size // 2

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + layer.eps).sqrt() * weight

    def heads(t: Tensor, count: int) -> Tensor:
        return t.reshape(batch, length, count, layer.head_size).transpose(1, 2)

    def rotate(t: Tensor) -> Tensor:
        frequency = layer.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(length, dtype=x.dtype)[:, None] * frequency
        turned = torch.complex(t[..., :half], t[..., half:]) * torch.exp(1j * angle)
        return torch.cat([turned.real, turned.imag], -1)

    n = norm(x, layer.input_layernorm)
    query = rotate(heads(n @ weights["q_proj"].T, HEADS))
    key = rotate(heads(n @ weights["k_proj"].T, KEYS)).repeat_interleave(HEADS // KEYS, 1)
    value = heads(n @ weights["v_proj"].T, KEYS).repeat_interleave(HEADS // KEYS, 1)
    scores = query @ key.mT / layer.head_size**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
    h = x + mixed.transpose(1, 2).reshape(batch, length, -1) @ weights["o_proj"].T
    n = norm(h, layer.post_attention_layernorm)
    between = F.silu(n @ weights["gate_proj"].T) * (n @ weights["up_proj"].T)
    out: Tensor = h + between @ weights["down_proj"].T
    return out


def gradients(
    run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, cotangent: Tensor
) -> dict[str, Tensor]:
    """The output, and the gradients of x and of all parameters that are trained."""
    x = x.detach().requires_grad_()
    out = run(x)
    leaves = {"x": x, **{n: p for n, p in layer.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05)]
)
def test_values_and_gradients_are_those_of_a_plain_layer_in_float64(
    dtype: torch.dtype, tolerance: float
) -> None:
    layer = layer_of().to(dtype)
    x, cotangent = torch.randn(2, 2, 7, HIDDEN).to(dtype)
    found = gradients(layer, layer, x, cotangent)
    assert len(found) == 2 + 2 * len(PROJECTIONS) + 2
    truth_layer = layer.double()
    expected = gradients(
        lambda x: plain(truth_layer, x), truth_layer, x.double(), cotangent.double()
    )
    for name, value in found.items():
        assert value.dtype == dtype, name
        error = (value.double() - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_layer_of_transformers(bias: bool) -> None:
    from transformers.models.llama import modeling_llama as llama

    config = llama.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=BETWEEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        attention_bias=bias,
        attn_implementation="eager",
    )
    torch.manual_seed(1)
    theirs = llama.LlamaDecoderLayer(config, 0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    linears = {
        path.rpartition(".")[2]: module
        for path, module in theirs.named_modules()
        if isinstance(module, nn.Linear)
    }
    norms = (theirs.input_layernorm.weight, theirs.post_attention_layernorm.weight)
    eps = config.rms_norm_eps
    layer = TransformerLayer.from_linear(linears, *norms, HEADS, KEYS, rank=4, eps=eps).double()
    with torch.no_grad():
        for name, own in layer.projections().items():
            own.lora_B.normal_(std=0.1)
            linears[name].weight.copy_(merged(own))
    x, cotangent = torch.randn(2, 2, 9, HIDDEN, dtype=torch.float64)
    positions = torch.arange(9)[None]
    rotary = llama.LlamaRotaryEmbedding(config)(x.float(), positions)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]

    def run(x: Tensor) -> Tensor:
        cos_sin = tuple(t.double() for t in rotary)
        out: Tensor = theirs(x, attention_mask=mask, position_embeddings=cos_sin)
        return out

    found = [gradients(layer, layer, x, cotangent), gradients(run, theirs, x, cotangent)]
    for name in ("out", "x"):  # their rotations, and norms, are computed in float32
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-5)


def test_frozen_weights_stay_bytes_and_absmax_is_not_rounded() -> None:
    layer = layer_of()
    linear = layer.q_proj
    before = linear.absmax.clone()
    assert layer.half() is layer
    assert linear.packed.dtype == torch.uint8
    assert torch.equal(linear.absmax, before)
    assert linear.lora_A.dtype == torch.float16
    assert {n for n, p in layer.named_parameters() if not p.requires_grad} == set()
    assert layer(torch.randn(1, 3, HIDDEN).half()).dtype == torch.float16


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="key_value_heads must divide 6; got 4"):
        TransformerLayer(HIDDEN, BETWEEN, HEADS, 4)
    with pytest.raises(ValueError, match="head_size must be even; got 5"):
        TransformerLayer(HIDDEN, BETWEEN, HEADS, head_size=5)
    linears = {name: nn.Linear(HIDDEN, HIDDEN, bias=False) for name in PROJECTIONS}
    linears["down_proj"] = nn.Linear(HIDDEN, 3)
    with pytest.raises(ValueError, match=r"down_proj must be \(24, 24\); got \(3, 24\)"):
        TransformerLayer.from_linear(linears, torch.ones(HIDDEN), torch.ones(HIDDEN), HEADS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layer")
    (folder / "net.py").write_text(NET)
    torch.save(layer_of().state_dict(), folder / "net.pt")
    return api.export(
        folder / "net.pt",
        folder / "bundle",
        model=f"{folder / 'net.py'}:layer",
        inputs=(TensorSpec("x", "float32", ("batch", "length", HIDDEN)),),
        format=["onnx"],
    ).folder


def test_an_export_verifies_in_onnxruntime_and_is_a_node_for_each_projection(bundle: Path) -> None:
    graph = onnx.load(bundle / "forward.onnx", load_external_data=False).graph
    nodes = [node for node in graph.node if node.domain == "fuseport.ops"]
    assert sorted(node.op_type for node in nodes) == [
        *["nf4_linear"] * 7,
        *["rms_norm"] * 2,
        "swiglu",
    ]
    kinds = {t.name: t.data_type for t in graph.initializer}
    bytes_ = {name for name, kind in kinds.items() if kind == onnx.TensorProto.UINT8}
    assert bytes_ == {f"{name}.packed" for name in PROJECTIONS}
    report = api.verify(bundle, runtime=["onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
    names = {row.tensor for row in report.results if row.artifact == "gradient.onnx"}
    assert names >= {f"grad/{name}.lora_{which}" for name in PROJECTIONS for which in "AB"}
    assert names >= {"grad/x", "grad/input_layernorm", "grad/post_attention_layernorm"}


def test_the_fused_kernels_run_in_onnxruntime(fused_library: Path, bundle: Path) -> None:
    report = api.verify(bundle, runtime=["onnxruntime+fused"])
    assert report.exit_code(strict=True) == 0, report.failures()
