"""Folders of transformers whose linear layers bitsandbytes has stored in four bits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models._quantized.four_bits import FourBitLinear, Stored
from fuseport.exporter.verify.report import Report
from fuseport.ops.nf4_linear import dequantize_4bit, quantize_4bit
from fuseport.ops.nf4_linear.storage import CODES

FIXTURES = Path(__file__).parent.parent / "fixtures"


def passes(report: Report) -> None:
    assert not [row for row in report.results if row.verdict != "pass"]
    assert report.results


def nodes(file: Path) -> int:
    return sum(node.op_type == "nf4_linear" for node in onnx.load(file).graph.node)


def test_a_layer_computes_in_the_dtype_that_it_is_told() -> None:
    """As bitsandbytes: inputs are rounded to it, and the result comes back in theirs."""
    torch.manual_seed(0)
    layer, x = FourBitLinear(nn.Linear(64, 8), Stored(64, "nf4")), torch.randn(3, 64)
    layer.packed, layer.absmax = quantize_4bit(torch.randn(8, 64), 64)
    plain = layer(x)
    layer.compute_dtype = torch.bfloat16
    out = layer(x)
    assert out.dtype == x.dtype
    assert not torch.equal(out, plain)
    assert torch.equal(out, out.bfloat16().float())
    assert torch.equal(out, layer(x.bfloat16().float()))


@pytest.mark.parametrize(
    ("name", "layers", "trained"),
    [
        ("nf4", 2 * 4, {"layers.0.mixer.dt_proj.bias", "layers.0.mixer.A_log"}),
        ("fp4", 7, {"layers.0.input_layernorm.weight", "embed_tokens.weight"}),
    ],
)
def test_it_computes_what_bitsandbytes_does_and_verifies(
    tmp_path: Path, name: str, layers: int, trained: set[str]
) -> None:
    model, _ = models.from_checkpoint(checkpoint.load(FIXTURES / name))
    expected = load_file(FIXTURES / name / "expected.safetensors")
    with torch.no_grad():
        found = model.module(expected["input_ids"])[0]
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=1e-5)

    bundle = api.export(FIXTURES / name, tmp_path / "bundle", format=["onnx"])
    assert nodes(bundle.folder / "forward.onnx") == layers
    passes(api.verify(bundle.folder, runtime=["eager", "onnxruntime"]))
    gradients = {spec["name"] for spec in bundle.manifest["programs"]["gradient"]["outputs"]}
    assert trained <= {gradient.partition(".")[2] for gradient in gradients}
    frozen = ("_proj.weight", "packed", "absmax")
    assert not [gradient for gradient in gradients if gradient.endswith(frozen)]


def stored(weight: Tensor, name: str, quant_type: str = "nf4") -> dict[str, Tensor]:
    """What bitsandbytes saves of a weight that it has quantized once."""
    packed, absmax = quantize_4bit(weight, quant_type=quant_type)
    state = {"quant_type": quant_type, "blocksize": 64, "dtype": "float32"}
    said = json.dumps({**state, "shape": [*weight.shape]}).encode()
    return {
        name: packed[:, None],
        f"{name}.absmax": absmax,
        f"{name}.quant_map": torch.tensor(CODES[quant_type]),
        f"{name}.quant_state.bitsandbytes__{quant_type}": torch.tensor([*said]).byte(),
    }


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    """A folder of a Llama in NF4, and one in torch with the very values of these weights."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_bias=True,
        )
    ).eval()
    folder = tmp_path / "llama"
    module.save_pretrained(folder)
    tensors: dict[str, Tensor] = {**load_file(folder / "model.safetensors")}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and name != "lm_head":
            weight = tensors.pop(f"{name}.weight")
            tensors |= stored(weight, f"{name}.weight")
            values = dequantize_4bit(*quantize_4bit(weight), tuple(weight.shape))
            part.weight.data = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    return folder, module


def edit(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


Llama = tuple[Path, LlamaForCausalLM]


def test_any_model_of_transformers_may_have_such_layers(llama: Llama) -> None:
    folder, expected = llama
    model, _ = models.from_checkpoint(checkpoint.load(folder))
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        found = model.module(tokens)[0]
        torch.testing.assert_close(found, expected(tokens).logits, rtol=0, atol=1e-5)
    layer = model.module.get_submodule("model.layers.0.self_attn.q_proj")
    assert torch.equal(layer.weight, expected.model.layers[0].self_attn.q_proj.weight)


def test_the_layers_of_a_gpt2_may_be_such_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    expected = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    expected.save_pretrained(tmp_path)
    tensors: dict[str, Tensor] = {**load_file(tmp_path / "model.safetensors")}
    for name, part in expected.named_modules():
        if hasattr(part, "nx"):  # (in, out); bitsandbytes has it the other way around
            weight = tensors.pop(f"{name}.weight").T.contiguous()
            quant_type = "fp4" if "mlp" in name else "nf4"
            tensors |= stored(weight, f"{name}.weight", quant_type)
            found = quantize_4bit(weight, 64, quant_type)
            part.weight.data = dequantize_4bit(*found, tuple(weight.shape), 64, quant_type).T
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    model, _ = models.from_checkpoint(checkpoint.load(tmp_path))
    assert {code: len(model.config["settings"][code]) for code in CODES} == {"nf4": 2, "fp4": 2}
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        logits = model.module(tokens)[0]
        torch.testing.assert_close(logits, expected(tokens).logits, rtol=0, atol=1e-5)


def test_half_precision_keeps_the_scales_and_verifies(llama: Llama, tmp_path: Path) -> None:
    words = ["export", str(llama[0]), "-o", str(tmp_path / "b"), "--dtype", "float16"]
    done = CliRunner().invoke(main, [*words, "--format", "onnx"])
    assert done.exit_code == 0, done.output
    assert "stay float32 in float16: those called q_proj.absmax" in done.output
    assert nodes(tmp_path / "b" / "forward.onnx") == 7
    passes(api.verify(tmp_path / "b", runtime=["eager", "onnxruntime"]))


def test_a_folder_says_what_it_is(llama: Llama) -> None:
    done = CliRunner().invoke(main, ["inspect", str(llama[0])])
    assert "nf4_linear × 7" in done.output
    assert f"next          fuseport export {llama[0]}" in done.output


def test_the_bytes_may_be_of_another_dtype(llama: Llama) -> None:
    expected = models.from_checkpoint(checkpoint.load(llama[0]))[0].module.state_dict()
    tensors = load_file(llama[0] / "model.safetensors")
    changed(llama[0], {UP: tensors[UP].reshape(-1).view(torch.bfloat16)[:, None]})  # as of FSDP
    found = models.from_checkpoint(checkpoint.load(llama[0]))[0].module.state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def said(**settings: Any) -> Tensor:
    state = {"blocksize": 64, "shape": [40, 24], "nested_blocksize": 256, "nested_offset": 0.0}
    return torch.tensor([*json.dumps({**state, **settings}).encode()]).byte()


def changed(folder: Path, change: Mapping[str, Tensor | None], rename: str = "") -> None:
    tensors = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if rename:
        kept = {name.replace("q_proj", rename): tensor for name, tensor in kept.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.0.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"
NESTED = {
    f"{UP}.absmax": torch.zeros(15).byte(),
    f"{UP}.nested_absmax": torch.ones(1),
    f"{UP}.nested_quant_map": torch.ones(256),
}


@pytest.mark.parametrize(
    ("change", "rename", "kind", "told"),
    [
        ({f"{UP}.absmax": None}, "", CorruptInput, rf"{UP} is no weight in NF4: .*absmax"),
        ({UP: torch.zeros(7).byte()}, "", CorruptInput, rf"{UP} is no weight .* bytes"),
        ({STATE: said(blocksize=48)}, "", CorruptInput, rf"{UP} is no weight .* power of two"),
        ({STATE: torch.full((99999,), 91).byte()}, "", CorruptInput, rf"{UP} is no weight"),
        (
            {STATE: said(nested_blocksize=0), **NESTED},
            "",
            CorruptInput,
            rf"{UP} is no weight .* zero",
        ),
        ({f"{UP}.quant_state.bitsandbytes__nf4": torch.zeros(9).byte()}, "", CorruptInput, UP),
        (
            {f"{UP}.quant_state.bitsandbytes__af4": torch.zeros(9).byte()},
            "",
            Missing,
            rf"{UP} is in AF4 .* only four bits, NF4 and FP4, .* dequantize\(\), and save_",
        ),
        (
            {},
            "r_proj",
            Missing,
            r"self_attn\.r_proj is stored in four bits, and is no linear layer of .* dequantize",
        ),
    ],
)
def test_what_is_no_such_folder_is_refused(
    llama: Llama, change: dict[str, Tensor | None], rename: str, kind: type[Exception], told: str
) -> None:
    changed(llama[0], change, rename)
    with pytest.raises(kind, match=told):
        models.from_checkpoint(checkpoint.load(llama[0]))


@pytest.mark.parametrize("code", CODES)
def test_what_a_manifest_says_of_layers_is_looked_at(llama: Llama, code: str) -> None:
    settings = {**checkpoint.load(llama[0]).config, code: ["q_proj"]}
    with pytest.raises(CorruptInput, match="no block size each"):
        models.build("huggingface", {"settings": settings})
