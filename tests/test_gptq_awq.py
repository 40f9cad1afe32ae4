"""Folders of transformers whose layers GPTQ, AWQ or compressed-tensors has in a few bits."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.ops.matmul_nbits import from_gptq
from fuseport.ops.matmul_nbits.storage import pack_codes, unpack_codes

FIXTURES = Path(__file__).parent.parent / "fixtures"
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(params=["gptq", "awq"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of the two Llamas."""
    return copied(request.param, tmp_path)


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    return copied("gptq", tmp_path)


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def module_of(folder: Path, **more: Any) -> nn.Module:
    model, _ = models.from_checkpoint(checkpoint.load(folder), **more)
    return model.module.float()


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(tokens)[0]
    return found


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_it_computes_what_the_packages_decode(name: str) -> None:
    expected = load_file(FIXTURES / name / "expected.safetensors")
    found = logits(module_of(FIXTURES / name), expected["input_ids"])
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=2e-6)


def test_it_verifies(tmp_path: Path) -> None:
    bundle = api.export(FIXTURES / "gptq", tmp_path / "bundle", format=["onnx"])
    nodes = [node.op_type for node in onnx.load(bundle.folder / "forward.onnx").graph.node]
    assert nodes.count("matmul_nbits") == 7
    report = api.verify(bundle.folder, runtime=["onnxruntime"])
    assert report.results
    assert not [row for row in report.results if row.verdict != "pass"]
    outputs = [spec["name"] for spec in bundle.manifest["programs"]["gradient"]["outputs"]]
    of = {output.removeprefix("grad/model.") for output in outputs}
    assert {"embed_tokens.weight", "norm.weight", "layers.0.self_attn.v_proj.bias"} <= of
    assert not [n for n in of if n.endswith(("_proj.weight", "packed", "scales", "zero_points"))]


def packed(folder: Path, **weights: Any) -> None:
    """Turns a folder of GPTQ into one of compressed-tensors."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        stored = from_gptq(tensors, name, 4, 32)
        assert stored.order is not None
        codes = unpack_codes(stored.packed, 4).flatten(1)[:, stored.order.argsort()]
        zeros = unpack_codes(stored.zero_points, 4)[:, : stored.scales.shape[1]]
        zero_words = pack_codes(zeros.T, 4).contiguous().view(torch.int32)
        parts = {
            "weight_packed": pack_codes(codes, 4).contiguous().view(torch.int32),
            "weight_scale": stored.scales.half(),
            "weight_zero_point": zero_words.T.contiguous(),
            "weight_shape": torch.tensor(codes.shape),
            "weight_g_idx": tensors[f"{name}.g_idx"],
        }
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{part}"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    way = {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": way, "input_activations": None}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_of_compressed_tensors_is_the_same(gptq: Path) -> None:
    packed(gptq)
    expected = load_file(gptq / "expected.safetensors")
    found = logits(module_of(gptq), expected["input_ids"])
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=2e-6)
    config = {"settings": checkpoint.load(gptq).config}
    assert models.quantized(config) == []  # of what `recognise` has not seen
    recognised = models.recognised(checkpoint.load(gptq))
    assert recognised is not None
    [said] = models.quantized(recognised[1])
    assert said.startswith("7 layers by compressed-tensors, in 4 bits, groups of 32")


FOUR = {"num_bits": 4}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"format": "int-quantized"}, "compressed-tensors in the format int-quantized, and only"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "says kv_cache_scheme of compressed-tensors, and"),
        ({"sparsity_config": {"format": "sparse-24"}}, "says sparsity_config of compressed"),
        (
            {
                "config_groups": {
                    "a": {"weights": {"num_bits": 4}},
                    "b": {"weights": {"num_bits": 8}},
                }
            },
            "several config_groups of other bits",
        ),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4}, "input_activations": {"a": 1}}}},
            "says input_activations of compressed-tensors, and only weights alone",
        ),
    ],
)
def test_what_else_compressed_tensors_has_is_refused(
    gptq: Path, settings: dict[str, Any], told: str
) -> None:
    packed(gptq)
    say(gptq, **settings)
    with pytest.raises(Missing, match=told):
        models.from_checkpoint(checkpoint.load(gptq))


def test_a_folder_says_what_it_is(folder: Path) -> None:
    done = CliRunner().invoke(main, ["inspect", str(folder)])
    said = {
        "gptq": "7 layers by GPTQ, in 4 bits, groups of 32, inputs in another order",
        "awq": "7 layers by AWQ, in 4 bits, groups of 32\n",
    }
    assert f"quantized     {said[folder.name]}" in done.output
    assert "matmul_nbits × 7" in done.output


def test_the_weight_is_there_for_code_that_asks_for_it(folder: Path) -> None:
    module = module_of(folder)
    layer: Any = module.get_submodule(DOWN)
    x = torch.randn(3, 128)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer_bias(layer))


def layer_bias(layer: Any) -> Tensor | int:
    return 0 if layer.bias is None else layer.bias


def test_a_lora_adapter_goes_beside(folder: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, 64, generator=generator), torch.randn(64, 3, generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    said = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    names = (f"base_model.model.{QUERY}.lora_{part}.weight" for part in "AB")
    save_file(dict(zip(names, (a, b), strict=True)), adapter / "adapter_model.safetensors")
    layer: Any = module_of(folder, adapter=checkpoint.load(adapter)).get_submodule(QUERY)
    plain: Any = module_of(folder).get_submodule(QUERY)
    x = torch.randn(2, 64)
    torch.testing.assert_close(layer(x), plain(x) + 2 * x @ a.T @ b.T, rtol=1e-5, atol=1e-4)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["lora_A", "lora_B"]


def test_biases_that_a_model_has_not_count_where_they_are_not_zero(folder: Path) -> None:
    tokens = torch.arange(8)[None]
    before = logits(module_of(folder), tokens)
    change(folder, {f"{DOWN}.bias": torch.zeros(64).half()})  # as some versions save it
    assert torch.equal(logits(module_of(folder), tokens), before)
    change(folder, {f"{DOWN}.bias": torch.ones(64).half()})
    module = module_of(folder)
    assert not torch.equal(logits(module, tokens), before)
    assert torch.equal(module.get_submodule(DOWN).bias, torch.ones(64))


def test_tables_that_old_files_have_are_left_out(gptq: Path) -> None:
    tokens = torch.arange(8)[None]
    before = logits(module_of(gptq), tokens)
    change(gptq, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(logits(module_of(gptq), tokens), before)


def change(folder: Path, tensors: Mapping[str, Tensor | None]) -> None:
    changed = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def say(folder: Path, **settings: Any) -> None:
    """Other settings of the quantization; None takes one away."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    said = {**config["quantization_config"], **settings}
    config["quantization_config"] = {k: v for k, v in said.items() if v is not None}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"checkpoint_format": "marlin"}, r"GPTQ in the format marlin, and only gptq and gptq_v2"),
        ({"bits": 3}, r"GPTQ in 3 bits, and only 2 or 4 or 8 are read; quantize the model again"),
        ({"dynamic": {"+:.*down": {"bits": 8}}}, r"says dynamic, .* \(\+:\.\*down\), and only one"),
        (
            {"quant_method": "hqq"},
            r"quant_method hqq: only bitsandbytes' four bits, and those of",
        ),
        ({"quant_method": None}, r"_proj\.qweight is of a quantized layer, and config\.json"),
    ],
)
def test_what_is_not_read_is_refused_in_a_line(
    gptq: Path, settings: dict[str, Any], told: str
) -> None:
    say(gptq, **settings)
    with pytest.raises(Missing, match=told) as refused:
        models.from_checkpoint(checkpoint.load(gptq))
    assert "\n" not in str(refused.value)


def test_groups_larger_than_a_row_are_whole_rows(gptq: Path) -> None:
    """However large: no memory is taken for what is beyond."""
    tensors = load_file(gptq / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith((".qzeros", ".scales")):
            tensors[name] = tensor[:1].contiguous()
        elif name.endswith(".g_idx"):
            tensors[name] = torch.zeros_like(tensor)
    change(gptq, tensors)
    say(gptq, group_size=-1)
    expected = logits(module_of(gptq), torch.arange(8)[None])
    say(gptq, group_size=2**44)
    assert torch.equal(logits(module_of(gptq), torch.arange(8)[None]), expected)


def test_layers_that_are_left_out_by_a_rule_are_plain(gptq: Path) -> None:
    say(gptq, dynamic={"-:.*lm_head": {}})
    assert isinstance(module_of(gptq).get_submodule("lm_head"), nn.Linear)


@pytest.mark.parametrize(
    ("tensors", "settings", "told"),
    [
        ({f"{QUERY}.scales": None}, {}, rf"{QUERY} is no weight of GPTQ: .*scales"),
        ({f"{QUERY}.qzeros": torch.zeros(2, 9).int()}, {}, rf"{QUERY} is no weight .*qzeros must"),
        ({f"{QUERY}.qweight": torch.zeros(8, 64)}, {}, rf"{QUERY} is no weight of .* int32"),
        ({f"{QUERY}.g_idx": torch.zeros(64).int()}, {}, rf"{QUERY} is no weight .*g_idx must"),
        ({}, {"group_size": 24}, "_proj is no weight of GPTQ: groups of 24 codes"),
        ({}, {"group_size": 64}, rf"{DOWN} is no weight of GPTQ: .*qzeros must be of 2 gr"),
        ({f"{QUERY}.qweight": torch.zeros(8).int()}, {}, rf"{QUERY} is no weight .* is no matrix"),
        ({}, {"bits": "4"}, "says bits 4 and group_size 32, which are no numbers"),
    ],
)
def test_what_is_no_such_folder_is_refused(
    gptq: Path, tensors: dict[str, Tensor | None], settings: dict[str, Any], told: str
) -> None:
    change(gptq, tensors)
    say(gptq, **settings)
    with pytest.raises(CorruptInput, match=told):
        models.from_checkpoint(checkpoint.load(gptq))


@pytest.mark.parametrize(
    "said",
    [
        ["q_proj"],
        {QUERY: 4},
        {QUERY: {"bits": 5}},
        {QUERY: {"bits": 4, "group_size": 8, "reordered": False, "biased": False}},
        {QUERY: {"bits": 4, "group_size": 2**40, "reordered": False, "biased": False}},
    ],
)
def test_what_a_manifest_says_of_layers_is_looked_at(gptq: Path, said: Any) -> None:
    settings = {**checkpoint.load(gptq).config, "nbits": said}
    with pytest.raises(
        CorruptInput, match=r"is not how each is stored|groups of 1099511627776 codes in rows of 64"
    ):
        models.build("huggingface", {"settings": settings})


def test_a_layer_that_the_model_has_not_is_refused(gptq: Path) -> None:
    tensors = load_file(gptq / "model.safetensors")
    parts = {n: t for n, t in tensors.items() if n.startswith(f"{QUERY}.")}
    change(gptq, dict.fromkeys(parts))
    change(gptq, {n.replace("q_proj", "r_proj"): t for n, t in parts.items()})
    with pytest.raises(Missing, match=r"r_proj is stored in 4 bits, and is no linear layer of"):
        models.from_checkpoint(checkpoint.load(gptq))
