"""Folders that transformers saves: Mamba models and hybrids, with the fused ops inside."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.errors import Missing
from fuseport.exporter.models import huggingface
from fuseport.exporter.models.model import Model
from fuseport.exporter.models.user import parse_inputs

COMMON = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1}
MIXER = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2,
         "mamba_chunk_size": 8}  # fmt: skip
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
SHARED = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24}
SIZES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "FalconMamba": {"state_size": 4},
    "Jamba": {"num_hidden_layers": 3, "mamba_d_state": 4, "num_experts": 3,
              "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, **ATTENTION},
    # The layers of attention are one layer, with an adapter each in Zamba2.
    "Zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
              "mamba_d_state": 4, "n_mamba_heads": 2, "mamba_dt_rank": 2,
              "attention_head_dim": 16, **SHARED},
    "Zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
               "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8,
               "adapter_rank": 4, "num_mem_blocks": 1, **SHARED},
    "Bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], **MIXER, **ATTENTION},
    "FalconH1": {"mamba_d_ssm": 32, "head_dim": 8, **MIXER, **ATTENTION},
    "NemotronH": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
                  "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
                  "chunk_size": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12,
                  "n_group": 1, "topk_group": 1, **ATTENTION},
    "GraniteMoeHybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
                         "num_local_experts": 3, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 24, **MIXER, **ATTENTION},
}  # fmt: skip
SCANS = dict.fromkeys(SIZES, 1) | {"Jamba": 2, "Zamba": 8, "Zamba2": 4}  # a scan a head in Zamba


def saved(kind: str, folder: Path, **options: Any) -> Any:
    """A small model of transformers', random but for no parameter at a special value."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | SIZES[kind])
    module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_pretrained(folder, **options)
    return module


def loaded(folder: Path) -> Model:
    model, _ = models.from_checkpoint(checkpoint.load(folder))
    assert model.architecture == "huggingface"
    return model


def ids_of(length: int) -> Tensor:
    return torch.randint(0, 30, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4KB"}], ids=["whole", "sharded"])
def test_the_model_is_the_one_saved(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path, **options)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(options)
    module = loaded(tmp_path).module
    ids = ids_of(9)
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        # Experts are summed in another order.
        torch.testing.assert_close(module(ids).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SIZES)
def test_every_scan_is_the_op_and_gives_the_same(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    model = loaded(tmp_path)
    assert model.scans == SCANS[kind]
    (forward,) = api.capture(model, ["forward"])  # refuses another number of scans
    run = forward.exported.module()
    for length in (1, 19):
        ids = ids_of(length)
        with torch.no_grad():
            expected = model.module(ids).logits
            with model.fused():
                fused = model.module(ids).logits
            torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(run(ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Mamba2", "FalconMamba", "NemotronH"])
def test_it_verifies(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "saved")
    bundle = api.export(tmp_path / "saved", tmp_path / "bundle", format=["onnx", "torchscript"])
    report = api.verify(bundle.folder, runtime=["onnxruntime", "torchscript"])
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {row.program for row in report.results} == {"forward", "gradient"}


@pytest.mark.parametrize(("kind", "op"), [("Jamba", "selective_scan"), ("Bamba", "ssd_chunk_scan")])
def test_inspect_tells_the_ops_of_a_hybrid(kind: str, op: str, tmp_path: Path) -> None:
    """Its attention asks whether a mask is all true, which tensors without data cannot say."""
    saved(kind, tmp_path / "saved")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "saved")])
    assert done.exit_code == 0, done.output
    assert f"huggingface, by config:model_type={kind.lower()}\n" in done.output
    assert f"{op} × {SCANS[kind]}" in done.output


CLASSIFIER = """
import torch
from transformers import AutoConfig, AutoModel

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = AutoModel.from_config(AutoConfig.from_pretrained("FOLDER", use_cache=False))
        self.head = torch.nn.Linear(16, 3)

    def forward(self, ids, mask):
        found = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head(found.mean(1))
"""


def test_a_model_of_the_users_own_around_transformers_layers(tmp_path: Path) -> None:
    """With a head, a mask and experts, which transformers computes in float32 alone by default.

    Its masks of padding are not looked at where a sequence is one token long.
    """
    theirs = saved("GraniteMoeHybrid", tmp_path / "granite")
    (tmp_path / "own.py").write_text(CLASSIFIER.replace("FOLDER", str(tmp_path / "granite")))
    head = {"head.weight": torch.randn(3, 16), "head.bias": torch.randn(3)}
    body = {f"body.{name}": t for name, t in theirs.model.state_dict().items()}
    torch.save(head | body, tmp_path / "own.pt")
    model = f"{tmp_path / 'own.py'}:Classifier"
    inputs = parse_inputs(["ids:int64[batch,length]<30", "mask:int64[batch,length]<2"])
    bundle = api.export(
        tmp_path / "own.pt", tmp_path / "b", model=model, inputs=inputs, format=["onnx"]
    )
    manifest = json.loads((bundle.folder / "manifest.json").read_text())
    assert any(operator.startswith("fuseport::ssd_chunk_scan") for operator in manifest["ops"])
    assert manifest["programs"]["forward"]["conditions"] == ["length >= 2"]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    tensors = {row.tensor for row in report.results if row.runtime == "onnxruntime"}
    assert {"output", "grad/head.weight", "grad/body.layers.0.mamba.A_log"} <= tensors


def test_fused_ops_stay_until_the_last_has_left() -> None:
    file = "transformers.models.bamba.modeling_bamba"
    module = importlib.import_module(file)
    own = module.mamba2_chunk_scan
    first, second = huggingface.fused([file]), huggingface.fused([file])
    with first:
        second.__enter__()
    assert module.mamba2_chunk_scan is not own
    second.__exit__(None, None, None)
    assert module.mamba2_chunk_scan is own


def test_what_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    saved("Mamba2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_heads": 7}))
    with pytest.raises(Missing, match=r"refuses the config\.json of this mamba2: ") as raised:
        loaded(tmp_path)
    assert "\n" not in str(raised.value)


def test_an_absent_expert_is_missed(tmp_path: Path) -> None:
    saved("Jamba", tmp_path)
    found = checkpoint.load(tmp_path)
    del found.tensors["model.layers.1.feed_forward.experts.1.up_proj.weight"]
    with pytest.raises(Missing, match=r"missing: .*experts\.gate_up_proj"):
        models.from_checkpoint(found)
