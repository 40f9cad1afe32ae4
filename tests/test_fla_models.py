"""Models of flash-linear-attention: folders that it writes, and a user's own of its layers."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models, shims
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.errors import ExportFailed, Missing
from fuseport.tests.test_fla import INSTALLED
from fuseport.tests.test_fla import models as theirs

COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 30, "hidden_ratio": 2}
HEADS = {**COMMON, "num_heads": 2, "head_dim": 8, "expand_v": 1}
SETTINGS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "gated_deltanet": ("GatedDeltaNet", {
        **HEADS, "tie_word_embeddings": True, "num_v_heads": 4,
        "attn": {"layers": [1], "num_heads": 2, "num_kv_heads": 1}},
        {"gated_delta_rule", "causal_conv1d", "rms_norm", "rms_norm_gated", "rotary_embedding",
         "swiglu"}),
    "kda": ("KDA", HEADS, {"gated_delta_rule", "causal_conv1d", "rms_norm", "swiglu"}),
    "gla": ("GLA", {**COMMON, "num_heads": 2},
            {"dplr_delta_rule", "rms_norm", "rms_norm_gated", "swiglu"}),
    "rwkv7": ("RWKV7", {**COMMON, "head_dim": 8}, {"dplr_delta_rule"}),
    "retnet": ("RetNet", {**COMMON, "num_heads": 2},
               {"ssd_chunk_scan_discrete", "rms_norm", "rms_norm_gated", "rotary_embedding",
                "swiglu"}),
}  # fmt: skip


def saved(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    name, settings, _ = SETTINGS[kind]
    with shims.installed():
        config = getattr(theirs, f"{name}Config")(**settings, use_cache=False)
        module = getattr(theirs, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        module.save_pretrained(folder)
    return module


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_folder_of_theirs_holds_the_ops_at_any_length(kind: str, tmp_path: Path) -> None:
    module = saved(kind, tmp_path / "saved")
    bundle = api.export(
        tmp_path / "saved", tmp_path / "b", format="exported_program", programs="forward"
    )
    ops = {
        re.sub("_backward$", "", name.removeprefix("fuseport::")) for name in bundle.manifest["ops"]
    }
    assert ops == SETTINGS[kind][2]
    program = torch.export.load(tmp_path / "b" / "forward.pt2").module()
    for length in (1, 70):
        ids = torch.randint(30, (3, length))
        with shims.installed(), torch.no_grad():
            expected = module(ids).logits
        torch.testing.assert_close(program(ids), expected, rtol=1e-4, atol=1e-4)


def test_a_hybrid_verifies(tmp_path: Path) -> None:
    saved("gated_deltanet", tmp_path / "saved")
    api.export(tmp_path / "saved", tmp_path / "b", format="onnx")
    report = api.verify(tmp_path / "b", runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    config = open_bundle(tmp_path / "b").manifest["architecture"]["config"]
    assert {"fla", *({"triton"} - INSTALLED)} <= set(config["shims"])


def test_names_that_transformers_has_stay_its_own(tmp_path: Path) -> None:
    assert transformers.CONFIG_MAPPING["mamba2"] is transformers.Mamba2Config
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "vocab_size": 30,
              "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1,
              "num_hidden_layers": 1}  # fmt: skip
    transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**config)).save_pretrained(tmp_path)
    model, _ = models.from_checkpoint(checkpoint.load(tmp_path))
    assert type(model.module) is transformers.Mamba2ForCausalLM


def test_what_has_no_form_here_is_named_at_the_export(tmp_path: Path) -> None:
    with shims.installed():
        config = theirs.GSAConfig(**COMMON, num_heads=2, num_slots=4, use_cache=False)
        theirs.GSAForCausalLM(config).save_pretrained(tmp_path / "saved")
    with pytest.raises(ExportFailed, match=r"fla\.ops\.gsa\.\S+gsa launched the Triton kernel"):
        api.export(tmp_path / "saved", tmp_path / "b")
    with pytest.raises(ExportFailed, match="export that dimension with a fixed size"):
        api.export(tmp_path / "saved", tmp_path / "b")


def test_kernels_of_what_has_no_form_here_are_computed_at_a_fixed_length(tmp_path: Path) -> None:
    with shims.installed():
        few = {**COMMON, "num_hidden_layers": 1}
        config = theirs.GSAConfig(**few, num_heads=2, num_slots=4, use_cache=False)
        theirs.GSAForCausalLM(config).save_pretrained(tmp_path / "saved")
    given = f"input_ids:int64[batch,3]<{COMMON['vocab_size']}"
    api.export(tmp_path / "saved", tmp_path / "b", inputs=given, format="exported_program")
    report = api.verify(tmp_path / "b")
    assert report.exit_code() == 0, report.failures()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GLA99"]}, r"fla \S+ has no GLA99 of the model_type gla \("),
        (
            {"model_type": "gla99"},
            r"transformers \S+ has no GLAForCausalLM of the model_type gla99",
        ),
        ({"num_heads": "two"}, r"fla \S+ refuses the config.json of this gla: "),
    ],
)
def test_what_a_folder_of_theirs_lacks_is_one_line(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved("gla", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(Missing, match=said):
        models.from_checkpoint(checkpoint.load(tmp_path))


CODE = """
from fla.layers import GatedDeltaNet, MultiScaleRetention
from fla.modules import GatedMLP, RMSNorm
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(8)
        self.mixer = GatedDeltaNet(hidden_size=8, head_dim=4, num_heads=1, expand_v=2)
        self.other = MultiScaleRetention(hidden_size=8, num_heads=1)
        self.mlp = GatedMLP(8, hidden_ratio=2)

    def forward(self, x):
        h, residual = self.norm(self.mixer(x)[0], residual=x, prenorm=True)
        return residual + self.mlp(self.other(h)[0])
"""


def test_a_model_of_the_users_own_with_layers_of_theirs_verifies(tmp_path: Path) -> None:
    file, weights, bundle = (tmp_path / name for name in ("net.py", "net.pth", "b"))
    file.write_text(CODE)
    torch.manual_seed(0)
    with shims.installed():
        made: dict[str, Any] = {}
        exec(CODE, made)
        torch.save(made["Net"]().state_dict(), weights)
    command = ["export", str(weights), "-o", str(bundle), "--model", f"{file}:Net", "--format"]
    command += ["torchscript", "--input-shapes", "x:[batch,length,8]"]
    refused = CliRunner().invoke(main, command)
    there = find_spec("triton") is not None  # as with a torch for GPUs
    way = "fuseport.ops.causal_conv1d computes it (" if there else "has a stand-in for triton: "
    assert f"{way}--shim auto" in refused.output
    done = CliRunner().invoke(main, [*command, "--shim", "auto"])
    assert done.exit_code == 0, done.output
    assert re.search(r"took the place of .*of kernels in fla: see", done.output)
    done = CliRunner().invoke(
        main, ["verify", str(bundle), "--model", f"{file}:Net", "--runtime=torchscript"]
    )
    assert done.exit_code == 0, done.output
