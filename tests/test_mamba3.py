"""Mamba3LM against the stand-in for mamba_ssm, its decoding, and recognising what is Mamba-3."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from fuseport.cli import main
from fuseport.exporter import api, models, shims
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import mamba, mamba2, mamba3
from fuseport.exporter.models.mamba3 import Mamba3Config, Mamba3LM
from fuseport.exporter.models.model import at
from fuseport.exporter.models.weights import fit
from fuseport.exporter.program.float64 import Float64
from fuseport.tests.test_decoding import built, token_by_token, zeros

with shims.installed(shims.SHIMS):
    from mamba_ssm import MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig

SMALL = Mamba3Config(
    d_model=16, n_layer=2, vocab_size=30, d_state=8, n_heads=4, d_inner=32, n_angles=2
)
MIMO = dataclasses.replace(SMALL, mimo=True, n_ranks=3)
VARIANTS = {
    "siso": SMALL,
    "siso_norm": dataclasses.replace(SMALL, n_angles=4, n_groups=2, mixer_norm=True),
    "mimo": MIMO,
    "mimo_norm": dataclasses.replace(MIMO, n_ranks=1, n_angles=4, mixer_norm=True, A_floor=0.7),
    "layer_norm": dataclasses.replace(SMALL, rms_norm=False, tie_embeddings=False),
}


def state_spaces_config(config: Mamba3Config) -> dict[str, Any]:
    """As state-spaces' config.json says it."""
    ssm = {
        "layer": "Mamba3",
        "d_state": config.d_state,
        "headdim": config.d_inner // config.n_heads,
        "ngroups": config.n_groups,
        "rope_fraction": 2 * config.n_angles / config.d_state,
        "is_outproj_norm": config.mixer_norm,
        "is_mimo": config.mimo,
        "A_floor": config.A_floor,
    }
    if config.mimo:
        ssm["mimo_rank"] = config.n_ranks
    return {
        "d_model": config.d_model,
        "d_intermediate": 0,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": config.rms_norm,
        "residual_in_fp32": True,
        "fused_add_norm": False,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.tie_embeddings,
    }


def theirs(config: Mamba3Config) -> Any:
    """The stand-in's model, no parameter at a special value."""
    torch.manual_seed(0)
    model = MambaLMHeadModel(MambaConfig(**state_spaces_config(config)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def checkpoint_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = {}) -> Checkpoint:
    return Checkpoint(Path("w.pt"), "state_dict", dict(tensors), dict(config), "")


def loaded(checkpoint: Checkpoint) -> Mamba3LM:
    config = mamba3.recognise(checkpoint)
    assert config is not None
    model = mamba3.model(json.loads(json.dumps(config, allow_nan=False)))
    fit(model.module, model.renamed(checkpoint.tensors), str(checkpoint.path))
    assert isinstance(model.module, Mamba3LM)
    return model.module.eval()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, 30, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VARIANTS)
def test_float64_logits_and_gradients_are_the_stand_ins(name: str) -> None:
    other = theirs(VARIANTS[name]).double()
    checkpoint = checkpoint_of(other.state_dict(), state_spaces_config(VARIANTS[name]))
    model = loaded(checkpoint)
    assert model.config == VARIANTS[name]
    assert mamba.recognise(checkpoint) is None
    assert mamba2.recognise(checkpoint) is None
    ids = ids_of(2, 9)
    with Float64():
        expected = other(ids).logits
        cotangent = torch.randn_like(expected)
        expected.backward(cotangent)
    logits = model(ids)
    logits.backward(cotangent)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-11)
    wanted = dict(other.named_parameters())
    named = dict(model.named_parameters())
    assert named.keys() == wanted.keys()
    for key, parameter in wanted.items():
        scale = parameter.grad.abs().max().item()
        assert scale > 0, key
        torch.testing.assert_close(
            named[key].grad, parameter.grad, rtol=1e-8, atol=1e-10 * max(scale, 1.0)
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_token_by_token_is_the_whole_sequence(name: str) -> None:
    model = built(mamba3, VARIANTS[name], torch.float64)
    step = at(model, "step")
    ids = ids_of(3, 7)
    with torch.no_grad():
        found = token_by_token(step.module, ids, zeros(step, 3))
        torch.testing.assert_close(found, model.module(ids), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["siso", "mimo_norm"])
def test_in_bfloat16_weights_stay_and_states_are_as_wide_as_they_are(name: str) -> None:
    model = built(mamba3, VARIANTS[name], torch.float32)
    ids = ids_of(2, 20)
    with torch.no_grad():
        expected = model.module(ids)
        stayed = models.convert(model, torch.bfloat16)
        logits = model.module(ids)
        step = at(model, "step")
        _, *states = step.module(ids[:, :1], *zeros(step, 2))
    kinds = {name.rpartition(".")[2] for name in stayed}
    mimo = {"mimo_x", "mimo_z", "mimo_o"} if VARIANTS[name].mimo else set()
    assert kinds == {"dt_bias", "B_bias", "C_bias", "D", *mimo}
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.04 * expected.norm()
    kinds_of_states = ["float32", "float32", "bfloat16", "bfloat16"]
    assert [spec.dtype for spec in step.inputs[1:]] == kinds_of_states
    assert [str(t.dtype) for t in states] == [f"torch.{kind}" for kind in kinds_of_states]


@pytest.mark.parametrize("name", ["siso", "mimo_norm"])
def test_a_state_spaces_folder_is_inspected_exported_and_verified(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "of_state_spaces"
    folder.mkdir()
    config = dataclasses.replace(VARIANTS[name], n_layer=1)
    other = theirs(config)
    said = state_spaces_config(config) | {"vocab_size": 27, "pad_vocab_size_multiple": 10}
    (folder / "config.json").write_text(json.dumps(said))
    torch.save(other.state_dict(), folder / "pytorch_model.bin")
    shown = CliRunner().invoke(main, ["inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "mamba3" in shown.output
    found, notes = models.from_checkpoint(checkpoints.load(folder))
    assert found.architecture == "mamba3"
    assert found.inputs[0].high == 30  # padded
    assert [n for n in notes if "assumed" in n] == [n for n in notes if "norm_epsilon" in n]
    bundle = api.export(
        folder, tmp_path / "bundle", programs=["forward", "gradient", "step"], format=["onnx"]
    )
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
    found_rows = {(row.runtime, row.program) for row in report.results}
    assert {("onnxruntime", p) for p in ("forward", "gradient", "step")} <= found_rows


def test_what_nothing_says_is_assumed_and_said() -> None:
    tensors = {f"net._orig_mod.{n}": t for n, t in Mamba3LM(SMALL).state_dict().items()}
    found = mamba3.recognise(checkpoint_of(tensors))
    assert found is not None
    assert found["assumed"] == ["norm_epsilon", "A_floor"]
    notes = mamba3.model(found).notes
    assert [n.split(": ")[1].split(" is")[0] for n in notes] == ["1e-05", "0.0001"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"ssm_cfg": {"d_state": 4}}, "d_state is 8 by the weights, and 4 by the config"),
        ({"ssm_cfg": {"ngroups": 2}}, "ngroups is 1 by the weights, and 2"),
        ({"ssm_cfg": {"headdim": 64}}, "headdim is 8 by the weights, and 64"),
        ({"ssm_cfg": {"is_mimo": False}}, "is_mimo is True by the weights, and False"),
        ({"ssm_cfg": {"mimo_rank": 4}}, "mimo_rank is 3 by the weights, and 4"),
        ({"A_floor": "1"}, "A_floor: it is '1', expected float"),
        ({"A_floor": -1.0}, "A_floor is -1.0, expected a number from 0 up"),
        (
            {"attn_layer_idx": [0]},
            r"attn_layer_idx is \[0\], but the layers without a scan are \[\]",
        ),
        ({"n_layer": 3}, "2 Mamba-3 layers, up to number 1, where 3 are"),
    ],
)
def test_a_config_against_the_weights(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(Missing, match=rf"^w\.pt: .*({reason})"):
        mamba3.recognise(checkpoint_of(Mamba3LM(MIMO).state_dict(), config))


def test_weights_that_make_no_sense_are_refused() -> None:
    tensors = Mamba3LM(SMALL).state_dict()
    name = "backbone.layers.0.mixer.in_proj.weight"
    with pytest.raises(Missing, match="a Mamba-3 of these shapes makes no sense: n_angles is 1"):
        mamba3.recognise(checkpoint_of({**tensors, name: tensors[name][:-1]}))
    mlp = {**tensors, "backbone.layers.0.mlp.router.weight": torch.zeros(2, 16)}
    with pytest.raises(Missing, match=r"mlp\.router\.weight: layers beside the Mamba-3 ones"):
        mamba3.recognise(checkpoint_of(mlp))


def test_other_models_are_not_mamba_3() -> None:
    small = mamba2.Mamba2Config(
        d_model=16, n_layer=1, vocab_size=30, d_state=4, d_conv=4, n_heads=4, d_ssm=32
    )
    tensors = mamba2.Mamba2LM(small).state_dict()
    assert mamba3.recognise(checkpoint_of(tensors)) is None
    assert mamba3.recognise(checkpoint_of({})) is None
    odd = {"backbone.embedding.weight": torch.ones(3, 4)}
    odd["backbone.layers.0.mixer.B_bias"] = torch.ones(3)
    assert mamba3.recognise(checkpoint_of(odd)) is None


@pytest.mark.parametrize(
    "change", [{"n_angles": 3}, {"n_ranks": 2}, {"A_floor": -1.0}, {"n_heads": 5}, {"d_state": 0}]
)
def test_a_manifest_that_makes_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptInput, match=f"a mamba3 configuration: .*{next(iter(change))} is"):
        mamba3.model(dataclasses.asdict(SMALL) | change)
