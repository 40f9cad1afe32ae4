"""LoRA adapters that PEFT saved: `export --adapter`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.ci import reuse
from fuseport.exporter.ci.config import read
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import Model

FIXTURES = Path(__file__).parent.parent / "fixtures"
BASE, ADAPTER = FIXTURES / "nf4", FIXTURES / "nf4_lora"


def loaded(base: Path, adapter: Path) -> Model:
    return models.from_checkpoint(checkpoint.load(base), adapter=checkpoint.load(adapter))[0]


def test_it_computes_what_peft_does_and_trains_the_adapter_alone(tmp_path: Path) -> None:
    expected = load_file(ADAPTER / "expected.safetensors")
    with torch.no_grad():
        found = loaded(BASE, ADAPTER).module(expected["input_ids"])[0]
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=1e-5)

    words = ["export", str(BASE), "--adapter", str(ADAPTER), "-o", str(tmp_path / "b")]
    done = CliRunner().invoke(main, [*words, "--format", "onnx"])
    assert done.exit_code == 0, done.output
    assert "4 layers have LoRA adapters, which alone have gradients: 3,392 numbers" in done.output
    assert "3,392 of them trainable" in done.output
    report = api.verify(tmp_path / "b", runtime=["eager", "onnxruntime"])
    assert report.results
    assert not [row for row in report.results if row.verdict != "pass"]
    gradients = {row.tensor for row in report.results if row.tensor.startswith("grad/")}
    assert len(gradients) == 8
    assert all(name.endswith(("lora_A", "lora_B")) for name in gradients)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["checkpoint"]["adapter"]["sha256"] == checkpoint.load(ADAPTER).sha256


def test_an_adapter_alone_says_what_to_export(tmp_path: Path) -> None:
    command = f"fuseport export fixtures/nf4 --adapter {ADAPTER} -o bundle/"
    assert command in CliRunner().invoke(main, ["inspect", str(ADAPTER)]).output
    done = CliRunner().invoke(main, ["export", str(ADAPTER), "-o", str(tmp_path / "b")])
    assert done.exit_code == 5
    assert command in done.output


Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A copy of the adapter with other settings and tensors; None takes one away."""

    def save(tensors: dict[str, Tensor | None] | None = None, **settings: Any) -> Path:
        folder = tmp_path / "adapter"
        folder.mkdir()
        config = json.loads((ADAPTER / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        kept = {**load_file(ADAPTER / "adapter_model.safetensors"), **(tensors or {})}
        left = {name: tensor for name, tensor in kept.items() if tensor is not None}
        save_file(left, folder / "adapter_model.safetensors")
        return folder

    return save


IN = "base_model.model.backbone.layers.0.mixer.in_proj"


@pytest.mark.parametrize(
    ("tensors", "settings", "kind", "said"),
    [
        ({}, {"peft_type": "IA3"}, Missing, "type IA3, and only LORA is read: merge it"),
        ({f"{IN}.lora_magnitude_vector": torch.ones(3)}, {}, Missing, "lora_magnitude_vector is"),
        ({f"{IN}.lora_A.weight": None}, {}, Missing, r"its adapter is .*lora_B.* takes 64 and"),
        ({f"{IN}.lora_A.weight": torch.ones(4, 63)}, {}, Missing, r"\(4, 63\).* fixtures/nf4"),
        (
            {f"{IN}z.lora_A.weight": torch.ones(1, 64), f"{IN}z.lora_B.weight": torch.ones(2, 1)},
            {},
            Missing,
            "in_projz has an adapter, and is no linear layer of a FalconMambaForCausalLM",
        ),
        ({}, {"lora_alpha": "12"}, CorruptInput, "lora_alpha is 12, and the rank 4"),
    ],
)
def test_what_is_no_such_adapter_is_refused(
    saved: Saved,
    tensors: dict[str, Tensor | None],
    settings: dict[str, Any],
    kind: type[Exception],
    said: str,
) -> None:
    with pytest.raises(kind, match=said):
        loaded(BASE, saved(tensors, **settings))
    with pytest.raises(Missing, match="no adapter that PEFT saved, but a checkpoint"):
        loaded(BASE, BASE)


def test_layers_of_any_kind_and_parameters_of_its_own(tmp_path: Path) -> None:
    """GPT-2's Conv1D; a head that is tied in the model and the adapter's own."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=99))
    gpt2.eval().save_pretrained(tmp_path / "gpt2")
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "modules_to_save": ["lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    a, b, head = torch.randn(2, 8), torch.randn(24, 2), torch.randn(40, 8)
    tensors = {
        "transformer.h.0.attn.c_attn.lora_A.weight": a,
        "transformer.h.0.attn.c_attn.lora_B.weight": b,
        "lm_head.weight": head,
    }
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")

    tokens = torch.arange(8)[None]
    gpt2.lm_head.weight = torch.nn.Parameter(head)
    gpt2.transformer.h[0].attn.c_attn.weight.data += (b @ a).T * 3
    with torch.no_grad():
        found = loaded(tmp_path / "gpt2", folder).module(tokens)[0]
        torch.testing.assert_close(found, gpt2(tokens).logits, rtol=1e-4, atol=1e-5)
    bundle = api.export(tmp_path / "gpt2", tmp_path / "b", adapter=folder, format="onnx")
    outputs = [spec["name"] for spec in bundle.manifest["programs"]["gradient"]["outputs"]]
    names = ["lm_head.weight", *(f"transformer.h.0.attn.c_attn.lora_{x}" for x in "AB")]
    assert sorted(outputs[1:]) == sorted(f"grad/{name}" for name in names)
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()


def test_what_a_manifest_says_of_adapters_is_looked_at() -> None:
    model = loaded(BASE, ADAPTER)
    known = model.config["lora"]
    for said in ("x", {**known, "saved": ["y"]}, {"saved": [], "layers": {"backbone": [1, 1.0]}}):
        other = models.build("huggingface", {k: v for k, v in model.config.items() if k != "lora"})
        with pytest.raises(CorruptInput, match="what is said of adapters fits no Falcon"):
            models.lora.place(other.module, {"lora": said})


def test_a_file_of_checkpoints_may_name_one(tmp_path: Path, saved: Saved) -> None:
    folder = saved()
    text = f'[[checkpoint]]\npath = "{BASE}"\nadapter = "adapter"\n'
    (tmp_path / "fuseport.toml").write_text(text)
    (named,) = read(tmp_path / "fuseport.toml").checkpoint
    assert Path(str(named.adapter)).samefile(folder)
    before = reuse.key(named)
    (folder / "adapter_config.json").write_text("{}")
    assert reuse.key(named) != before
