"""Codestral Mamba's folder, written as Mistral's code does, and built as the Mamba-2 that it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuseport import shims
from fuseport.exporter import api, models
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter.errors import Missing
from fuseport.exporter.inspect import inspect
from fuseport.exporter.models.model import Model

PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "vocab_size": 30, "n_groups": 2, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8,
    "tie_embeddings": False, "model_type": "mamba",
}  # fmt: skip


@pytest.fixture(scope="module")
def codestral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A small one, random but for no parameter at a special value, by mamba_ssm's own classes'
    stand-ins, from MambaArgs as mistral_inference turns them into a MambaConfig."""
    folder = tmp_path_factory.mktemp("codestral")
    with shims.installed("mamba_ssm"):
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        torch.manual_seed(0)
        config = MambaConfig(
            d_model=PARAMS["dim"],
            n_layer=PARAMS["n_layers"],
            vocab_size=PARAMS["vocab_size"],
            ssm_cfg={"ngroups": PARAMS["n_groups"], "layer": "Mamba2"},
            attn_layer_idx=[],
            attn_cfg={},
            **{name: PARAMS[name] for name in PARAMS if name not in (
                "dim", "n_layers", "vocab_size", "n_groups", "model_type")},
        )  # fmt: skip
        theirs: nn.Module = MambaLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    (folder / "params.json").write_text(json.dumps(PARAMS))
    tensors = {f"model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    save_file(tensors, folder / "consolidated.safetensors")
    return folder, theirs


def loaded(folder: Path) -> tuple[Model, tuple[str, ...]]:
    return models.from_checkpoint(checkpoints.load(folder))


def ids_of(length: int) -> Tensor:
    return torch.randint(0, 30, (2, length), generator=torch.Generator().manual_seed(1))


def test_it_is_mamba_2_with_its_groups_and_the_norm_after_the_gate(
    codestral: tuple[Path, nn.Module],
) -> None:
    folder, theirs = codestral
    model, notes = loaded(folder)
    assert model.architecture == "mamba2"
    config = model.config
    assert (config["n_groups"], config["d_state"], config["n_heads"]) == (2, 128, 2)
    assert not config["norm_before_gate"]
    assert not config["tie_embeddings"]
    assert model.inputs[0].high == 32, "the padded vocabulary"
    assert any("prefix model." in note for note in notes)
    with torch.no_grad():
        torch.testing.assert_close(model.module(ids_of(19)), theirs(ids_of(19)).logits)


def test_transformers_agrees(codestral: tuple[Path, nn.Module]) -> None:
    """Whose converter of this checkpoint strips `model.` and takes these settings."""
    folder, _ = codestral
    model, _ = loaded(folder)
    config = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=64, state_size=128, n_groups=2,
        vocab_size=32, residual_in_fp32=True, tie_word_embeddings=False, chunk_size=8,
    )  # fmt: skip
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    stored = load_file(folder / "consolidated.safetensors")
    names = {n: n.removeprefix("model.").replace("embedding.", "embeddings.") for n in stored}
    theirs.load_state_dict({names[name]: tensor for name, tensor in stored.items()})
    with torch.no_grad():
        expected = theirs(ids_of(19), use_cache=False).logits
        found = model.module(ids_of(19))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_inspect_says_which_it_is(codestral: tuple[Path, nn.Module]) -> None:
    found = inspect(codestral[0]).found
    assert found["layout"]["name"] == "mistral"
    assert found["architecture"]["name"] == "mamba2"
    assert {op["op"] for op in found["ops"]["needed"]} == {
        "causal_conv1d", "rms_norm_gated", "ssd_chunk_scan"}  # fmt: skip


def test_it_exports_and_verifies(codestral: tuple[Path, nn.Module], tmp_path: Path) -> None:
    kinds = ["onnx", "torchscript"]
    programs = ["forward", "gradient", "step"]
    bundle = api.export(codestral[0], tmp_path / "b", format=kinds, programs=programs)
    report = api.verify(bundle.folder, runtime=["onnxruntime", "torchscript"])
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {row.program for row in report.results} == set(programs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_groups": 3}, "n_groups = 3"),
        ({"n_layers": 3}, "2 Mamba-2 layers, up to number 1, where 3 are expected"),
        ({"n_groups": "2"}, "n_groups: it is '2', expected int"),
        ({"tie_embeddings": True}, "lm_head.weight: tied to the embedding by the config"),
    ],
)
def test_params_against_the_weights(
    codestral: tuple[Path, nn.Module], tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    (tmp_path / "consolidated.safetensors").symlink_to(codestral[0] / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | change))
    with pytest.raises(Missing, match=reason):
        loaded(tmp_path)
