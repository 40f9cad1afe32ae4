"""Language models with layers of attention and feed-forward layers among those that scan."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api, models, shims
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.exporter.models import mamba, mamba2, mamba3
from fuseport.exporter.models.model import Model, at
from fuseport.exporter.models.weights import fit
from fuseport.exporter.program.float64 import Float64
from fuseport.ops.compositions.rotary_attention import Heads, rotary_attention
from fuseport.tests.test_decoding import token_by_token

with shims.installed(shims.SHIMS):
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

ATTENTION = {
    "causal": True,
    "d_conv": 4,
    "head_dim": 8,
    "num_heads": 4,
    "num_heads_kv": 2,
    "out_proj_bias": False,
    "qkv_proj_bias": False,
    "rotary_emb_dim": 4,
}
"""With the keys of state-spaces/mamba2attn-2.7b."""
SCANS: dict[str, dict[str, Any]] = {
    "Mamba1": {"d_state": 4},
    "Mamba2": {"d_state": 4, "headdim": 8},
    "Mamba3": {"d_state": 8, "headdim": 8},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba2attn": {"ssm": "Mamba2", "attn_cfg": ATTENTION},
    "mamba": {
        "ssm": "Mamba1",
        "attn_cfg": {"num_heads": 2, "causal": True, "softmax_scale": 1, "rotary_emb_base": 100},
        "attn_layer_idx": [0, 2],
        "d_intermediate": 24,
    },
    "mamba3": {
        "ssm": "Mamba3",
        "attn_cfg": {**ATTENTION, "rotary_emb_interleaved": True, "mlp_dim": 20},
        "d_intermediate": 128,
        "rms_norm": False,
    },
    "fed": {"ssm": "Mamba2", "attn_cfg": {}, "attn_layer_idx": [], "d_intermediate": 40},
    "looks ahead": {"ssm": "Mamba2", "attn_cfg": {"num_heads": 4, "num_heads_kv": 1}},
}


def config_of(name: str) -> dict[str, Any]:
    """As state-spaces' config.json says it."""
    config = {"d_model": 16, "n_layer": 3, "vocab_size": 30, "d_intermediate": 0}
    config |= {"attn_layer_idx": [1], "rms_norm": True, "residual_in_fp32": True}
    config |= {"fused_add_norm": False, "pad_vocab_size_multiple": 1, "tie_embeddings": True}
    config |= VARIANTS[name]
    ssm = config.pop("ssm")
    return config | {"ssm_cfg": {"layer": ssm, **SCANS[ssm]}}


def theirs(name: str) -> Any:
    """The stand-in's model, no parameter at a special value."""
    torch.manual_seed(0)
    model = MambaLMHeadModel(MambaConfig(**config_of(name)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def checkpoint_of(module: torch.nn.Module, config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("w.pt"), "state_dict", dict(module.state_dict()), config, "")


def loaded(name: str, other: torch.nn.Module) -> Model:
    architecture = {"Mamba1": mamba, "Mamba2": mamba2, "Mamba3": mamba3}[VARIANTS[name]["ssm"]]
    checkpoint = checkpoint_of(other, config_of(name))
    config = architecture.recognise(checkpoint)
    assert config is not None
    model = architecture.model(json.loads(json.dumps(config, allow_nan=False)))
    fit(model.module, model.renamed(checkpoint.tensors), str(checkpoint.path))
    model.module.eval()
    return model


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, 30, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VARIANTS)
def test_float64_logits_and_gradients_are_the_stand_ins(name: str) -> None:
    other = theirs(name).double()
    module = loaded(name, other).module
    ids = ids_of(2, 9)
    with Float64():
        expected = other(ids).logits
        cotangent = torch.randn_like(expected)
        expected.backward(cotangent)
    logits = module(ids)
    logits.backward(cotangent)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    named = dict(module.named_parameters())
    wanted = dict(other.named_parameters())
    assert named.keys() == wanted.keys()
    for key, parameter in wanted.items():
        scale = parameter.grad.abs().max().item()
        assert scale > 0, key
        torch.testing.assert_close(named[key].grad, parameter.grad, rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "looks ahead"])
def test_token_by_token_it_is_the_same(name: str) -> None:
    model = loaded(name, theirs(name).double())
    step, ids = at(model, "step"), ids_of(3, 12)
    sizes = {"batch": 3, "past": 0}
    starts = [
        torch.zeros(
            [d if isinstance(d, int) else sizes[d] for d in spec.dims], dtype=spec.torch_dtype
        )
        for spec in step.inputs[1:]
    ]
    with torch.no_grad():
        found = token_by_token(step.module, ids, starts)
        torch.testing.assert_close(found, model.module(ids), rtol=1e-10, atol=1e-12)
    assert len(step.outputs or ()) == len(step.inputs)


def test_states_of_attention_are_by_layer() -> None:
    model = loaded("mamba2attn", theirs("mamba2attn"))
    step = at(model, "step")
    assert model.scans == step.scans == 2
    assert {spec.name: spec.dims for spec in step.inputs} == {
        "input_ids": ("batch", 1),
        "conv_states": (2, "batch", 40, 3),
        "ssm_states": (2, "batch", 4, 8, 4),
        "filter_1": ("batch", 64, 3),
        "key_1": ("batch", 2, "past", 8),
        "value_1": ("batch", 2, "past", 8),
    }


def test_attention_that_looks_ahead_has_no_step() -> None:
    model = loaded("looks ahead", theirs("looks ahead"))
    with pytest.raises(UsageError, match="attention that looks ahead cannot decode"):
        at(model, "step")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_its_formulas(interleaved: bool, causal: bool) -> None:
    """Pairs of channels as complex numbers, turned by e^(i·position·frequency)."""
    heads = Heads(
        queries=4, keys=2, width=6, turned=4, base=50.0, interleaved=interleaved, causal=causal
    )
    qkv = torch.randn(2, 5, heads.channels, dtype=torch.float64)
    q, k, v = (
        t.unflatten(-1, (-1, 6)).transpose(1, 2) for t in qkv.split([4 * 6, 2 * 6, 2 * 6], -1)
    )

    def turned(x: Tensor) -> Tensor:
        pairs = x[..., :4].unflatten(-1, (2, 2))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        frequencies = torch.tensor([1.0, 50.0**-0.5], dtype=torch.float64)
        angles = torch.arange(5, dtype=torch.float64)[:, None] * frequencies
        out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles))
        out = out if interleaved else out.transpose(-1, -2)
        return torch.cat([out.flatten(-2), x[..., 4:]], -1)

    expected = torch.empty(2, 4, 5, 6, dtype=torch.float64)
    q, k = turned(q), turned(k)
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].mT / math.sqrt(6)
        if causal:
            ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -math.inf)
        expected[:, head] = scores.softmax(-1) @ v[:, head // 2]
    y, keys, values = rotary_attention(qkv, heads)
    torch.testing.assert_close(y, expected.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(keys, k)
    torch.testing.assert_close(values, v)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_layer_idx": [2]}, r"attn_layer_idx is \[2\], but the layers without a scan are"),
        ({"attn_layer_idx": None, "attn_cfg": None}, "layer 1 is attention, whose weights do not"),
        ({"attn_cfg": {"causal": True}}, "layer 1 is attention, whose weights do not tell"),
        ({"attn_cfg": {"num_heads": 4, "window": 2}}, "attn_cfg: window is no argument"),
        ({"attn_cfg": {"num_heads": 4, "num_heads_kv": 3}}, "attn_cfg: 4 heads of 4"),
        ({"attn_cfg": {"num_heads": "4"}}, "attn_cfg: .*; correct the config"),
        ({"attn_cfg": {"num_heads": 0}}, "attn_cfg: .*; correct the config"),
        ({"attn_cfg": {"num_heads": 4, "causal": 1}}, "causal is 1, expected .*bool"),
        ({"attn_cfg": {"num_heads": 4, "rotary_emb_dim": 3}}, "3 channels of 4 cannot be turned"),
        ({"attn_cfg": {"num_heads": 4, "softmax_scale": -1}}, "scale is -1, expected"),
        ({"attn_cfg": {"num_heads": 4, "d_conv": -1}}, "d_conv is -1"),
        ({"n_layer": 4}, "2 Mamba-2 layers and 1 of attention, up to number 2, where 4 are"),
    ],
)
def test_a_config_against_the_weights(change: dict[str, Any], reason: str) -> None:
    checkpoint = checkpoint_of(theirs("mamba2attn"), config_of("mamba2attn") | change)
    with pytest.raises(Missing, match=rf"^w\.pt: .*{reason}"):
        mamba2.recognise(checkpoint)


def test_weights_of_other_heads_are_told() -> None:
    other = theirs("mamba2attn")
    config = config_of("mamba2attn") | {"attn_cfg": {**ATTENTION, "num_heads": 2}}
    found = mamba2.recognise(checkpoint_of(other, config))
    assert found is not None
    with pytest.raises(Missing, match=r"layers\.1\.mixer\.in_proj\.weight"):
        fit(mamba2.model(found).module, other.state_dict(), "w.pt")


def test_a_layer_that_lost_its_rates_is_no_attention() -> None:
    tensors = dict(theirs("fed").state_dict())
    del tensors["backbone.layers.2.mixer.A_log"]
    checkpoint = Checkpoint(Path("w.pt"), "state_dict", tensors, config_of("fed"), "")
    with pytest.raises(Missing, match="2 Mamba-2 layers, up to number 1, where 3 are expected"):
        mamba2.recognise(checkpoint)


def test_manifests_of_before() -> None:
    """They have no word about hybrids; what they have is checked."""
    config = mamba2.recognise(checkpoint_of(theirs("mamba2attn"), config_of("mamba2attn")))
    assert config is not None
    attention = config["attention"]
    with pytest.raises(CorruptInput, match="4 heads of 8 channels with 3"):
        mamba2.model(
            config | {"attention": {**attention, "heads": {**attention["heads"], "keys": 3}}}
        )
    plain = {k: v for k, v in config.items() if k not in ("attention", "d_intermediate")}
    assert mamba2.model(plain).scans == 3


@pytest.mark.parametrize("name", ["mamba2attn", "mamba"])
def test_a_folder_exports_and_verifies(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(theirs(name).state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    found, _ = models.from_checkpoint(checkpoints.load(folder))
    assert found.architecture == name.removesuffix("attn")
    api.export(
        folder,
        tmp_path / "bundle",
        programs=["forward", "gradient", "step"],
        format=["torchscript", "exported_program", "onnx"],
    )
    report = api.verify(tmp_path / "bundle")
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
    rows = {(row.runtime, row.program) for row in report.results}
    assert {("onnxruntime", p) for p in ("forward", "gradient", "step")} <= rows
