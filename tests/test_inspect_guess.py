"""The ops that `fuseport inspect` guesses for models of unknown architecture, and why."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import nn
from transformers.models.deformable_detr import modeling_deformable_detr as detr

from fuseport import shims
from fuseport.cli import main
from fuseport.exporter.inspect.guess import guessed
from fuseport.exporter.models._huggingface.library import library
from fuseport.ops import OPS
from fuseport.ops.evidence import Evidence

WITHOUT = {
    "correlation": "a cost volume has no parameters",
    "causal_conv1d_update": "decoding has no parameters of its own",
    "selective_state_update": "decoding has no parameters of its own",
    "softmax_cross_entropy": "a loss has no parameters",
}
DECLARED = [(name, e) for name, spec in OPS.items() for e in spec.evidence]

Shapes = dict[str, tuple[int, ...]]


def shapes_of(module: nn.Module) -> Shapes:
    return {f"net.{name}": tuple(t.shape) for name, t in module.state_dict().items()}


def witnesses(evidence: Evidence) -> Shapes:
    """Tensors that are what the evidence says, in a module `layers.3`."""
    return {
        f"layers.3.{pattern.replace('*', 'a')}": tuple(5 if n is None else n for n in sizes)
        for pattern, sizes in evidence.tensors.items()
    }


def told(shapes: Shapes) -> dict[str, list[str]]:
    """By op, what speaks for it."""
    return {op["op"]: [seen["what"] for seen in op["evidence"]] for op in guessed(shapes)}


def test_every_op_has_evidence_or_a_reason_for_having_none() -> None:
    assert {name for name, spec in OPS.items() if not spec.evidence} == WITHOUT.keys()


@pytest.mark.parametrize(("op", "evidence"), DECLARED, ids=[f"{n}-{e.what}" for n, e in DECLARED])
def test_all_of_an_ops_evidence_is_wanted(op: str, evidence: Evidence) -> None:
    shapes = witnesses(evidence)
    assert evidence.what in told(shapes)[op]
    for name, shape in shapes.items():
        others = {n: s for n, s in shapes.items() if n != name}
        assert evidence.what not in told(others).get(op, ())
        assert evidence.what not in told(others | {name: (*shape, 1)}).get(op, ())
        if others:
            elsewhere = {name.replace("layers.3", "layers.4"): shape}
            assert evidence.what not in told(others | elsewhere).get(op, ())
    for pattern in evidence.absent:
        beside = {f"layers.3.{pattern.replace('*', 'a')}": (5,)}
        assert op not in told(shapes | beside)


def modules() -> Iterator[tuple[str, Any, set[str]]]:
    with shims.installed("mamba_ssm"):
        from mamba_ssm.modules.mamba2 import Mamba2
        from mamba_ssm.modules.mamba_simple import Mamba
    yield "Mamba", Mamba(16), {"selective_scan", "causal_conv1d"}
    mamba2 = Mamba2(16, headdim=8)
    yield "Mamba2", mamba2, {"ssd_chunk_scan", "causal_conv1d", "rms_norm_gated"}
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        vocab_size=30,
    )  # fmt: skip
    yield "Llama", transformers.LlamaForCausalLM(config), {"rms_norm", "swiglu"}
    deformable = detr.DeformableDetrMultiscaleDeformableAttention(
        transformers.DeformableDetrConfig(d_model=16, use_timm_backbone=False), 4, 4
    )
    yield "Deformable DETR", deformable, {"ms_deform_attn"}
    library("gla")  # before others import it: transformers keeps its names so
    with shims.installed():
        from fla import layers
    sizes = {"hidden_size": 16, "num_heads": 2}
    ops, normed = {"gated_delta_rule", "causal_conv1d"}, {"DeltaNet": {"rms_norm"}}
    deltas: dict[str, dict[str, Any]] = {
        "GatedDeltaNet": {"head_dim": 8}, "KimiDeltaAttention": {"head_dim": 8}, "DeltaNet": {},
    }  # fmt: skip
    for name, more in deltas.items():
        yield f"fla's {name}", getattr(layers, name)(**sizes, **more), ops | normed.get(name, set())
    gla = layers.GatedLinearAttention(**sizes, use_output_gate=False)
    yield "fla's GLA", gla, {"dplr_delta_rule", "rms_norm"}
    hgrn = layers.HGRN2Attention(hidden_size=16, num_heads=2, expand_ratio=8)
    yield "fla's HGRN2", hgrn, {"dplr_delta_rule", "rms_norm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla's, that RWKV-LM is to be preferred
        goose = layers.RWKV7Attention(hidden_size=16, head_dim=8, layer_idx=0, num_hidden_layers=2)
    yield "fla's RWKV-7", goose, {"dplr_delta_rule"}
    plain = nn.TransformerEncoderLayer(16, 2, 32)
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    yield "plain torch", nn.ModuleDict({"encoder": plain, "stem": normed}), set()


@pytest.mark.parametrize(
    ("module", "expected"), [pytest.param(m, e, id=n) for n, m, e in modules()]
)
def test_modules_as_their_projects_name_their_parameters(
    module: nn.Module, expected: set[str]
) -> None:
    assert told(shapes_of(module)).keys() == expected


def test_places_are_counted_and_the_first_is_shown() -> None:
    (evidence,) = OPS["ms_deform_attn"].evidence
    once = witnesses(evidence)
    twice = once | {name.replace("3", "4"): shape for name, shape in once.items()}
    (op,) = guessed(twice)
    assert (op["registered"], op["onnx"], op["differentiable"]) == (True, True, True)
    (seen,) = op["evidence"]
    assert seen["places"] == 2
    assert seen["tensors"] == {name: list(shape) for name, shape in once.items()}


def test_the_command_says_what_why_and_what_next(tmp_path: Path) -> None:
    """As Vim saves it: two sets of weights, and its own code to name."""
    names = {"A_log": (8, 2), "A_b_log": (8, 2), "conv1d.weight": (8, 1, 4), "D": (8,)}
    names |= {f"{part}{end}.weight": (4, 8) for part in ("x_proj", "dt_proj") for end in ("", "_b")}
    state = {f"layers.0.mixer.{name}": torch.zeros(shape) for name, shape in names.items()}
    path = tmp_path / "vim tiny.pth"
    torch.save({"model": state, "model_ema": state}, path)
    result = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ops"]["guessed"]
    assert [op["op"] for op in found["ops"]["needed"]] == ["causal_conv1d", "selective_scan"]
    (command,) = found["next"]
    assert f"'{path}' -o bundle/ --weights model --model" in command
    assert "--shim auto" in command
    printed = CliRunner().invoke(main, ["inspect", str(path)]).stdout
    assert "by a scan backwards in time, of Vim or VideoMamba × 1" in printed
    assert "layers.0.mixer.A_b_log [8, 2]" in printed
    assert "guessed from names and shapes" in printed
