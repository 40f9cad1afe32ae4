"""Mamba2LM against transformers' own Mamba-2 and the paper, and recognising what is Mamba-2."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter import models
from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import mamba, mamba2
from fuseport.exporter.models.mamba2 import Mamba2Config, Mamba2LM
from fuseport.exporter.models.weights import fit
from fuseport.exporter.program.float64 import Float64

SMALL = Mamba2Config(
    d_model=16, n_layer=2, vocab_size=30, d_state=4, d_conv=4, n_heads=4, d_ssm=32, n_groups=2
)
VARIANTS = [
    SMALL,
    dataclasses.replace(SMALL, n_groups=1, tie_embeddings=False, conv_bias=False),
    dataclasses.replace(SMALL, d_mlp=8, proj_bias=True, rms_norm=False),
    dataclasses.replace(SMALL, D_has_hdim=True, mixer_norm=False),
    dataclasses.replace(SMALL, norm_before_gate=True, dt_min=0.01, dt_max=0.05, d_conv=2),
]


def randomised(module: torch.nn.Module) -> Any:
    """No parameter at a special value."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def huggingface(**changes: Any) -> transformers.Mamba2ForCausalLM:
    sizes = {"vocab_size": 30, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    sizes |= {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    return randomised(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes | changes)))


def checkpoint_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = {}) -> Checkpoint:
    return Checkpoint(Path("w.pt"), "state_dict", dict(tensors), dict(config), "")


def state_spaces_config(config: Mamba2Config) -> dict[str, Any]:
    """What of a configuration state-spaces' config.json says, beside the shapes."""
    bounds = [config.dt_min, math.inf if config.dt_max is None else config.dt_max]
    ssm = {"layer": "Mamba2", "ngroups": config.n_groups, "dt_limit": bounds}
    ssm["norm_before_gate"] = config.norm_before_gate
    return {"d_model": config.d_model, "n_layer": config.n_layer, "ssm_cfg": ssm,
            "attn_layer_idx": [], "norm_epsilon": config.norm_epsilon}  # fmt: skip


def loaded(checkpoint: Checkpoint) -> Mamba2LM:
    config = mamba2.recognise(checkpoint)
    assert config is not None
    model = mamba2.model(json.loads(json.dumps(config, allow_nan=False)))
    fit(model.module, model.renamed(checkpoint.tensors), str(checkpoint.path))
    assert isinstance(model.module, Mamba2LM)
    return model.module.eval()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, 30, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True, "use_conv_bias": False, "n_groups": 1},
        {"conv_kernel": 2, "num_heads": 8, "head_dim": 4, "tie_word_embeddings": True},
        {"layer_norm_epsilon": 0.1, "n_groups": 4, "residual_in_fp32": False},
        {"time_step_limit": (0.01, 0.1)},
    ],
)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 19)])
def test_float64_logits_and_gradients_are_transformers(
    changes: dict[str, Any], batch: int, length: int
) -> None:
    theirs = huggingface(**changes).double()
    model = loaded(checkpoint_of(theirs.state_dict(), theirs.config.to_dict()))
    ids = ids_of(batch, length)
    with Float64():
        expected = theirs(ids, use_cache=False).logits
        cotangent = torch.randn_like(expected)
        expected.backward(cotangent)
    logits = model(ids)
    logits.backward(cotangent)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    named = dict(model.named_parameters())
    wanted = {n.replace("embeddings", "embedding"): p for n, p in theirs.named_parameters()}
    assert named.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        assert scale > 0 or length == 1, name
        torch.testing.assert_close(named[name].grad, parameter.grad, rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.005)]
)
def test_working_dtypes_are_near_transformers(dtype: torch.dtype, bound: float) -> None:
    theirs = huggingface()
    model = loaded(checkpoint_of(theirs.state_dict(), theirs.config.to_dict()))
    ids = ids_of(2, 40)
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        logits = model.to(dtype)(ids)
    assert logits.dtype == dtype
    assert (logits.float() - expected).norm() < bound * expected.norm()


def mixer_of(config: Mamba2Config, mixer: Any, x: Tensor) -> Tensor:
    """A mixer by the formulas of the paper, a step at a time."""
    H, G, N = config.n_heads, config.n_groups, config.d_state
    projected = mixer.in_proj(x)
    d_mlp = config.d_mlp
    gate, beside = projected[..., :d_mlp], projected[..., d_mlp : 2 * d_mlp]
    parts = [config.d_ssm, config.d_ssm + 2 * G * N, H]
    z, inputs, dt = projected[..., 2 * d_mlp :].split(parts, -1)
    padded = F.pad(inputs.mT, (config.d_conv - 1, 0))
    inputs = F.silu(F.conv1d(padded, mixer.conv1d.weight, mixer.conv1d.bias, groups=parts[1])).mT
    u, B, C = inputs.split([config.d_ssm, G * N, G * N], -1)
    u = u.unflatten(-1, (H, -1))
    B, C = (t.unflatten(-1, (G, N)).repeat_interleave(H // G, 2) for t in (B, C))
    step = F.softplus(dt + mixer.dt_bias).clamp(*config.dt_limit)[..., None, None]
    h = torch.zeros(len(x), H, u.shape[-1], N, dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        h = torch.exp(step[:, t] * -mixer.A_log.exp()[:, None, None]) * h
        h = h + step[:, t] * u[:, t, ..., None] * B[:, t, :, None]
        out.append((h * C[:, t, :, None]).sum(-1) + mixer.D.view(H, -1) * u[:, t])
    y = torch.stack(out, 1).flatten(2)

    def norm(v: Tensor) -> Tensor:
        grouped = v.unflatten(-1, (G, -1))
        root = (grouped.square().mean(-1, keepdim=True) + config.mixer_epsilon).sqrt()
        return (grouped / root).flatten(-2) * mixer.norm.weight

    if not config.mixer_norm:
        y = y * F.silu(z)
    elif config.norm_before_gate:
        y = norm(y) * F.silu(z)
    else:
        y = norm(y * F.silu(z))
    return mixer.out_proj(torch.cat([F.silu(gate) * beside, y], -1))


@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_a_mixer_is_what_the_paper_says(config: Mamba2Config) -> None:
    model = randomised(Mamba2LM(config).double())
    mixer = model.backbone.layers[1].mixer
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), mixer_of(config, mixer, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("prefix", ["", "net._orig_mod."])
def test_the_configuration_is_found(config: Mamba2Config, prefix: str) -> None:
    tensors = {prefix + n: t for n, t in Mamba2LM(config).state_dict().items()}
    checkpoint = checkpoint_of(tensors, state_spaces_config(config))
    assert loaded(checkpoint).config == config
    assert mamba.recognise(checkpoint) is None


def test_a_state_spaces_folder(tmp_path: Path) -> None:
    model = randomised(Mamba2LM(SMALL))
    config = state_spaces_config(SMALL) | {"vocab_size": 27, "pad_vocab_size_multiple": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found, notes = models.from_checkpoint(checkpoints.load(tmp_path))
    assert found.architecture == "mamba2"
    assert found.inputs[0].high == 30  # padded
    assert not [note for note in notes if "assumed" in note]
    ids = ids_of(2, 7)
    assert torch.equal(found.module(ids), model(ids))


def test_what_nothing_says_is_assumed_and_said() -> None:
    config = dataclasses.replace(SMALL, n_groups=1)
    found = mamba2.recognise(checkpoint_of(Mamba2LM(config).state_dict()))
    assert found is not None
    assert found["assumed"] == ["norm_epsilon", "n_groups"]
    notes = mamba2.model(found).notes
    assert [note.split(": ")[1][:16] for note in notes] == ["1e-05 is assumed", "1 is assumed, st"]


def test_states_tell_the_groups() -> None:
    found = mamba2.recognise(checkpoint_of(Mamba2LM(SMALL).state_dict(), {"d_state": 4}))
    assert found is not None
    assert (found["n_groups"], found["d_state"]) == (2, 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"ssm_cfg": {"ngroups": 3}}, "n_heads is 4, .* n_groups = 3"),
        ({"ssm_cfg": {"ngroups": 2, "d_state": 3}}, "8 coefficients are not 2 groups of 3"),
        ({"ssm_cfg": {"ngroups": "2"}}, "ngroups: it is '2', expected int"),
        (
            {"attn_layer_idx": [0]},
            r"attn_layer_idx is \[0\], but the layers without a scan are \[\]",
        ),
        ({"n_layer": 3, "ngroups": 2}, "2 Mamba-2 layers, up to number 1, where 3 are"),
        ({"ngroups": 2, "dt_limit": [0.1]}, "dt_limit: it is not two numbers"),
        ({"ngroups": 2, "dt_limit": 0.1}, "dt_limit: it is 0.1, expected a list"),
        ({"ngroups": 2, "dt_limit": [0.2, 0.1]}, "dt_min is 0.2, dt_max is 0.1"),
    ],
)
def test_a_config_against_the_weights(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(Missing, match=rf"^w\.pt: .*{reason}"):
        mamba2.recognise(checkpoint_of(Mamba2LM(SMALL).state_dict(), config))


def test_transformers_names_without_a_config_are_refused() -> None:
    with pytest.raises(Missing, match="do not tell how many groups"):
        mamba2.recognise(checkpoint_of(huggingface().state_dict()))


def test_other_models_are_not_mamba_2() -> None:
    small = mamba.MambaConfig(
        d_model=16, n_layer=1, vocab_size=30, d_state=4, d_conv=4, d_inner=32, dt_rank=2
    )
    assert mamba2.recognise(checkpoint_of(mamba.MambaLM(small).state_dict())) is None
    tensors = Mamba2LM(SMALL).state_dict()
    assert mamba2.recognise(checkpoint_of(tensors, {"model_type": "bamba"})) is None
    assert mamba2.recognise(checkpoint_of({})) is None


@pytest.mark.parametrize(
    "change",
    [{"d_mlp": -1}, {"dt_max": 1}, {"mixer_epsilon": 0.0}, {"n_heads": 5}, {"dt_min": -0.1}],
)
def test_a_manifest_that_makes_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptInput, match=f"a mamba2 configuration: .*{next(iter(change))} is"):
        mamba2.model(dataclasses.asdict(SMALL) | change)
