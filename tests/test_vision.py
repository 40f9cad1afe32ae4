"""Vision Mamba and VMamba, built in: recognised from shapes, and what they compute.

Files are written as the projects' training scripts write them. What the models compute is held
against formulas written out here once more, step by step, without fuseport's ops.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import api, models
from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import vim, vmamba
from fuseport.exporter.models.vim import Vim, VimConfig
from fuseport.exporter.models.vmamba import VMamba, VMambaConfig

VIM = VimConfig(
    embed_dim=8, depth=2, d_state=4, d_conv=4, d_inner=16, dt_rank=1, channels=3, image_size=16,
    patch_size=4, stride=4, class_tokens=1, num_classes=5,
)  # fmt: skip
VIMS = [
    VIM,
    replace(VIM, class_tokens=2, rms_norm=False, stride=2, patch_size=4),
    replace(VIM, class_tokens=0, proj_bias=True, conv_bias=False, layer_scale=True),
    replace(VIM, num_classes=0, channels=1, image_size=8, d_conv=3),
]
VMAMBA = VMambaConfig(
    depths=(1, 2), dims=(8, 16), d_inner=(8, 16), dt_rank=(1, 2), mlp=(16, 32), d_state=1,
    d_conv=3, conv_bias=False, gate=False, gated_mlp=False, channels=3, image_size=16,
    patch_kernel=3, patch_version=2, patch_norm=True, downsample=3, pos_embed=False, num_classes=5,
)  # fmt: skip
FIRST_VMAMBA = replace(
    VMAMBA, d_inner=(16, 32), mlp=(0, 0), d_state=4, conv_bias=True, gate=True, patch_kernel=4,
    patch_version=1, downsample=1, image_size=20,
)  # fmt: skip
SHALLOW_VMAMBA = replace(VMAMBA, depths=(1, 1), image_size=8)
VMAMBAS = [
    VMAMBA,
    FIRST_VMAMBA,
    replace(VMAMBA, gated_mlp=True, gate=True, d_inner=(16, 32), downsample=2, pos_embed=True),
    replace(VMAMBA, d_conv=0, patch_norm=False, num_classes=0, depths=(1,), dims=(8,), d_inner=(8,),
            dt_rank=(1,), mlp=(16,), downsample=1),
]  # fmt: skip


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """No parameter at a special value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def network(config: VimConfig | VMambaConfig, seed: int = 0) -> nn.Module:
    return randomised(Vim(config) if isinstance(config, VimConfig) else VMamba(config), seed)


def trained(config: VimConfig | VMambaConfig, /, **changes: Any) -> dict[str, Any]:
    """What `main.py` of either project saves."""
    state = {
        "model": network(config).state_dict(),
        "model_ema": network(config, 1).state_dict(),
        "optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict(),
        "lr_scheduler": {"t_in_epochs": True},
        "epoch": 3,
        "scaler": {},
    }
    if isinstance(config, VimConfig):
        state["args"] = argparse.Namespace(input_size=config.image_size, model="vim", lr=1e-3)
    else:
        vssm = {"SSM_FORWARDTYPE": "v05_noz", "SSM_ACT_LAYER": "silu", "MLP_ACT_LAYER": "gelu"}
        state["config"] = {"DATA": {"IMG_SIZE": config.image_size}, "MODEL": {"VSSM": vssm}}
        state["max_accuracy"] = 80.0
    return state | changes


def loaded(path: Path, weights: str | None = None) -> tuple[models.Model, tuple[str, ...]]:
    return models.from_checkpoint(checkpoints.load(path, weights))


def named(config: VimConfig | VMambaConfig) -> str:
    return "vim" if isinstance(config, VimConfig) else "vmamba"


# --- recognition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*VIMS, *VMAMBAS])
def test_a_training_file_tells_the_whole_configuration(
    config: VimConfig | VMambaConfig, tmp_path: Path
) -> None:
    torch.save(trained(config), tmp_path / "w.pth")
    built, _ = loaded(tmp_path / "w.pth", "model_ema")
    assert built.architecture == named(config)
    kept = json.loads(json.dumps(built.config))
    assert {k: kept[k] for k in asdict(config)} == json.loads(json.dumps(asdict(config)))
    for name, tensor in network(config, 1).state_dict().items():
        assert torch.equal(built.module.state_dict()[name], tensor), name


def test_a_state_dict_alone_tells_the_image_from_positions_or_says_what_it_assumes(
    tmp_path: Path,
) -> None:
    config = replace(VIM, image_size=224, patch_size=16, stride=8, depth=1)
    torch.save({f"module.{n}": t for n, t in network(config).state_dict().items()}, tmp_path / "v")
    built, notes = loaded(tmp_path / "v")
    assert built.inputs[0].dims == ("batch", 3, 224, 224)
    assert built.config["stride"] == 8
    assert any("224×224, patches 8 pixels apart" in note for note in notes)
    assert any("middle" in note for note in notes)
    torch.save(network(VMAMBA).state_dict(), tmp_path / "w")
    built, notes = loaded(tmp_path / "w")
    assert built.inputs[0].dims == ("batch", 3, 224, 224)
    assert any("224×224" in note for note in notes)
    assert any("SiLU" in note for note in notes)


def first_names(name: str) -> str:
    """The first version's."""
    for later, first in (
        ("patch_embed.0.", "patch_embed.proj."),
        ("patch_embed.2.", "patch_embed.norm."),
        ("classifier.", ""),
        (".op.", ".self_attention."),
    ):
        name = name.replace(later, first)
    return name.replace(".norm.", ".ln_1.") if ".blocks." in name else name


def as_filters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `Linear2d` was stored for a time."""
    ends = ("in_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight", "reduction.weight")
    return {n: t[:, :, None, None] if n.endswith(ends) else t for n, t in state.items()}


def of_one_file(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As the version that is one file has them."""
    ends = ("x_proj_weight", "dt_projs_weight")
    return {
        n.replace("_weight", ".weight") if n.endswith(ends) else n: (
            t.flatten(0, 1) if n.endswith(ends) else t
        )
        for n, t in state.items()
    }


@pytest.mark.parametrize(
    "written",
    [lambda state: {first_names(n): t for n, t in state.items()}, as_filters, of_one_file],
    ids=["first names", "filters", "one file"],
)
@pytest.mark.parametrize("config", [FIRST_VMAMBA, VMAMBA], ids=["v0", "v05"])
def test_all_versions_of_vmambas_names_are_one_model(
    config: VMambaConfig, written: Callable[[Any], dict[str, Tensor]], tmp_path: Path
) -> None:
    state = network(config).state_dict()
    torch.save(trained(config, model=written(state), model_ema=None), tmp_path / "w.pth")
    built, _ = loaded(tmp_path / "w.pth")
    assert all(torch.equal(t, state[n]) for n, t in built.module.state_dict().items())


def without(config: VimConfig | VMambaConfig, end: str) -> dict[str, Any]:
    state = network(config).state_dict()
    kept = {name: tensor for name, tensor in state.items() if not name.endswith(end)}
    assert len(kept) < len(state)
    return trained(config, model=kept, model_ema=None)


def more(config: VimConfig | VMambaConfig, **tensors: Tensor) -> dict[str, Any]:
    state = dict(network(config).state_dict())
    added = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return trained(config, model=state | added, model_ema=None)


REFUSED = {
    "a parameter": (without(VIM, "layers.1.mixer.D_b"), "missing: layers.1.mixer.D_b"),
    "a filter": (without(VIM, "mixer.conv1d_b.weight"), "bimamba v1"),
    "the step sizes": (without(VIM, "layers.0.mixer.dt_proj.weight"), "dt_proj.weight: absent"),
    "a layer": (more(VIM, layers__4__mixer__A_b_log=torch.ones(16, 4)), "layers.2 is absent"),
    "rope": (more(VIM, rope__freqs_cos=torch.ones(4)), "if_rope"),
    "positions": (more(VIM, pos_embed=torch.ones(1, 13, 8)), "pos_embed"),
    "a shape": (more(VIM, norm_f__weight=torch.ones(9)), "norm_f.weight is (9,), expected (8,)"),
    "a norm": (without(VMAMBA, "op.out_norm.weight"), "norm after the scan"),
    "weights": (without(VMAMBA, "x_proj_weight"), "another scan"),
    "a projection": (without(VMAMBA, "layers.0.blocks.0.op.in_proj.weight"), "in_proj.weight is"),
    "a downsample": (without(VMAMBA, "downsample.3.bias"), "missing: layers.0.downsample.3.bias"),
    "a decoder": (more(VMAMBA, layers_up__0__weight=torch.ones(1)), "layers_up.0.weight, which it"),
    "batch norms": (more(VMAMBA, x__running_mean=torch.ones(1)), "batch norms"),
    "a forward type": (
        trained(VMAMBA, config={"MODEL": {"VSSM": {"SSM_FORWARDTYPE": "v052d"}}}, model_ema=None),
        "forward_type v052d",
    ),
    "a downsample of another kind": (
        more(VMAMBA, layers__0__downsample__1__weight=torch.ones(32)),
        "downsample 32",
    ),
    "an activation": (
        trained(VMAMBA, config={"MODEL": {"VSSM": {"SSM_ACT_LAYER": "gelu"}}}, model_ema=None),
        "SSM_ACT_LAYER gelu",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_or_damaged_checkpoint_gives_one_line_and_exit_code_5(
    what: str, tmp_path: Path
) -> None:
    state, said = REFUSED[what]
    torch.save(state, tmp_path / "w.pth")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "w.pth"), "-o", str(tmp_path / "b")])
    assert done.exit_code == 5, done.output
    lines = [line for line in done.stderr.splitlines() if not line.lstrip()[:1].isdigit()]
    assert len(lines) == 1
    assert said in lines[0]
    assert not (tmp_path / "b").exists()


def test_two_sets_of_weights_must_be_chosen_from(tmp_path: Path) -> None:
    torch.save(trained(VIM), tmp_path / "w.pth")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "w.pth"), "-o", str(tmp_path / "b")])
    assert done.exit_code == 2
    assert "--weights model_ema" in done.stderr


@pytest.mark.parametrize(("build", "config"), [(vim.model, VIM), (vmamba.model, VMAMBA)])
@pytest.mark.parametrize("change", [{"d_state": 0}, {"d_state": "4"}, {"d_conv": None}, None])
def test_a_manifest_whose_configuration_makes_no_sense_is_corrupt(
    build: Callable[[Any], Any], config: Any, change: dict[str, Any] | None
) -> None:
    data = {"assumed": [], **asdict(config), **(change or {})}
    if change is None:
        del data["channels"]
    with pytest.raises(CorruptInput, match="configuration"):
        build(data)


def test_other_models_are_not_taken_for_these(tmp_path: Path) -> None:
    video = dict(network(VIM).state_dict())
    video["patch_embed.proj.weight"] = torch.ones(8, 3, 1, 4, 4)
    torch.save(video, tmp_path / "w.pth")
    with pytest.raises(Missing, match="the architecture is not one of"):
        loaded(tmp_path / "w.pth")


# --- what they compute ---------------------------------------------------------------------------


def scanned(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """One walk: u, delta (b, l, d), A (d, N), B, C (b, l, N), D (d,) → (b, l, d)."""
    state, out = torch.zeros(len(u), *A.shape, dtype=u.dtype), []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        state = torch.exp(step * A) * state + step * u[:, t, :, None] * B[:, t, None]
        out.append((state * C[:, t, None]).sum(-1) + D * u[:, t])
    return torch.stack(out, 1)


def vim_by_hand(p: Mapping[str, Tensor], config: VimConfig, x: Tensor) -> Tensor:
    """Sec. 3 of Zhu et al., 2024, as `models_mamba.py` of the public code has it."""
    R, N = config.dt_rank, config.d_state

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.bias" in p:
            return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]

    def direction(u: Tensor, z: Tensor, mixer: str, end: str) -> Tensor:
        conv, bias = p[f"{mixer}.conv1d{end}.weight"], p.get(f"{mixer}.conv1d{end}.bias")
        u = F.conv1d(F.pad(u.mT, (config.d_conv - 1, 0)), conv, bias, groups=config.d_inner).mT
        u = F.silu(u)
        low_rank, B, C = (u @ p[f"{mixer}.x_proj{end}.weight"].mT).split([R, N, N], -1)
        delta = low_rank @ p[f"{mixer}.dt_proj{end}.weight"].mT + p[f"{mixer}.dt_proj{end}.bias"]
        A = -p[f"{mixer}.A{end}_log"].exp()
        y = scanned(u, F.softplus(delta), A, B, C, p[f"{mixer}.D{end}"])
        return y * F.silu(z)

    x = F.conv2d(x, p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], config.stride)
    x = x.flatten(2).mT
    count = x.shape[1]
    if config.class_tokens == 1:
        cls = p["cls_token"].expand(len(x), 1, -1)
        x = torch.cat([x[:, : count // 2], cls, x[:, count // 2 :]], 1)
    if config.class_tokens == 2:
        ends = [p[f"cls_token_{end}"].expand(len(x), 1, -1) for end in ("head", "tail")]
        x = torch.cat([ends[0], x, ends[1]], 1)
    x = x + p["pos_embed"]
    for i in range(config.depth):
        mixer = f"layers.{i}.mixer"
        xz = F.linear(
            norm(x, f"layers.{i}.norm"),
            p[f"{mixer}.in_proj.weight"],
            p.get(f"{mixer}.in_proj.bias"),
        )
        u, z = xz.chunk(2, -1)
        y = direction(u, z, mixer, "") + direction(u.flip(1), z.flip(1), mixer, "_b").flip(1)
        added = F.linear(y / 2, p[f"{mixer}.out_proj.weight"], p.get(f"{mixer}.out_proj.bias"))
        x = x + added * p.get(f"{mixer}.gamma", torch.ones(()))
    x = norm(x, "norm_f")
    pooled = {
        0: lambda: x.mean(1),
        1: lambda: x[:, count // 2],
        2: lambda: (x[:, 0] + x[:, -1]) / 2,
    }[config.class_tokens]()
    return F.linear(pooled, p["head.weight"], p["head.bias"]) if "head.weight" in p else pooled


def vmamba_by_hand(p: Mapping[str, Tensor], config: VMambaConfig, x: Tensor) -> Tensor:
    """Sec. 4 of Liu et al., 2024, as `vmamba.py` of the public code has it, channels first."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = x.movedim(1, -1)
        x = F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)
        return x.movedim(-1, 1)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.conv2d(x, p[f"{name}.weight"][:, :, None, None], p.get(f"{name}.bias"))

    def ss2d(x: Tensor, op: str) -> Tensor:
        x = linear(x, f"{op}.in_proj")
        x, z = x.chunk(2, 1) if config.gate else (x, None)
        if config.d_conv:
            weight, bias = p[f"{op}.conv2d.weight"], p.get(f"{op}.conv2d.bias")
            x = F.conv2d(x, weight, bias, padding=config.d_conv // 2, groups=x.shape[1])
        x = F.silu(x)
        D, R = p[f"{op}.dt_projs_weight"].shape[1:]
        A, skip = -p[f"{op}.A_logs"].exp().unflatten(0, (4, D)), p[f"{op}.Ds"].unflatten(0, (4, D))
        total = torch.zeros_like(x)
        for k in range(4):
            image = x.mT if k % 2 else x
            u = image.flatten(2).mT
            u = u.flip(1) if k > 1 else u
            low_rank, B, C = (u @ p[f"{op}.x_proj_weight"][k].mT).split(
                [R, A.shape[2], A.shape[2]], -1
            )
            delta = low_rank @ p[f"{op}.dt_projs_weight"][k].mT + p[f"{op}.dt_projs_bias"][k]
            y = scanned(u, F.softplus(delta), A[k], B, C, skip[k])
            y = (y.flip(1) if k > 1 else y).mT.reshape(image.shape)
            total = total + (y.mT if k % 2 else y)
        y = norm(total, f"{op}.out_norm")
        return linear(y if z is None else y * F.silu(z), f"{op}.out_proj")

    def mlp(x: Tensor, name: str) -> Tensor:
        x = linear(x, f"{name}.fc1")
        if config.gated_mlp:
            x, z = x.chunk(2, 1)
            return linear(x * F.gelu(z), f"{name}.fc2")
        return linear(F.gelu(x), f"{name}.fc2")

    def filtered(x: Tensor, name: str, stride: int, padding: int) -> Tensor:
        return F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], stride, padding)

    def maybe(x: Tensor, name: str) -> Tensor:
        return norm(x, name) if config.patch_norm else x

    if config.patch_version == 1:
        x = maybe(filtered(x, "patch_embed.0", config.patch_kernel, 0), "patch_embed.2")
    else:
        x = maybe(filtered(x, "patch_embed.0", config.patch_kernel - 1, 1), "patch_embed.2")
        x = filtered(F.gelu(x), "patch_embed.5", config.patch_kernel - 1, 1)
        x = maybe(x, "patch_embed.7")
    x = x + p.get("pos_embed", torch.zeros(()))
    for i, depth in enumerate(config.depths):
        for j in range(depth):
            block = f"layers.{i}.blocks.{j}"
            x = x + ss2d(norm(x, f"{block}.norm"), f"{block}.op")
            if config.mlp[i]:
                x = x + mlp(norm(x, f"{block}.norm2"), f"{block}.mlp")
        down = f"layers.{i}.downsample"
        if i == len(config.depths) - 1:
            break
        if config.downsample == 1:
            x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
            x = torch.cat([x[:, :, r::2, c::2] for c in (0, 1) for r in (0, 1)], 1)
            x = linear(norm(x, f"{down}.norm"), f"{down}.reduction")
        else:
            x = norm(filtered(x, f"{down}.1", 2, config.downsample - 2), f"{down}.3")
    pooled = norm(x, "classifier.norm").mean((2, 3))
    head = p.get("classifier.head.weight")
    return pooled if head is None else F.linear(pooled, head, p["classifier.head.bias"])


@pytest.mark.parametrize("config", [*VIMS, *VMAMBAS])
def test_float64_outputs_and_gradients_are_those_of_the_papers(
    config: VimConfig | VMambaConfig,
) -> None:
    module = network(config).double()
    torch.manual_seed(1)
    shape = (2, config.channels, config.image_size, config.image_size)
    ours, x = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    ours = x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    values = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    got = module(ours)
    if isinstance(config, VimConfig):
        expected = vim_by_hand(values, config, theirs)
    else:
        expected = vmamba_by_hand(values, config, theirs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    cotangent = torch.randn_like(expected)
    got.backward(cotangent)
    expected.backward(cotangent)
    pairs = [("x", ours.grad, theirs.grad)]
    pairs += [(n, p.grad, values[n].grad) for n, p in module.named_parameters()]
    for name, gradient, wanted in pairs:
        assert gradient is not None, name
        assert wanted is not None, name
        scale = wanted.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize("config", [VIM, VMAMBA], ids=named)
def test_a_training_file_exports_to_all_formats_and_verifies(
    config: VimConfig | VMambaConfig, tmp_path: Path
) -> None:
    shallow = replace(config, depth=1) if isinstance(config, VimConfig) else SHALLOW_VMAMBA
    torch.save(trained(shallow), tmp_path / "w.pth")
    api.export(tmp_path / "w.pth", tmp_path / "b", weights="model_ema")
    report = api.verify(tmp_path / "b")
    assert report.exit_code() == 0, report.failures()
    done = {(row.runtime, row.program) for row in report.results if row.verdict == "pass"}
    for runtime in ("eager", "torchscript", "exported_program", "onnxruntime"):
        assert {(runtime, "forward"), (runtime, "gradient")} <= done


@pytest.mark.parametrize("config", [VIM, VMAMBA], ids=named)
def test_half_precision_keeps_what_a_scan_wants_in_float32(
    config: VimConfig | VMambaConfig, tmp_path: Path
) -> None:
    torch.save(trained(config, model_ema=None), tmp_path / "w.pth")
    built, _ = loaded(tmp_path / "w.pth")
    x = torch.randn(2, config.channels, config.image_size, config.image_size)
    with torch.no_grad():
        expected = built.module(x)
        stayed = models.convert(built, torch.bfloat16)
        got = built.module(x)
    ends = {name.rpartition("mixer.")[2].rpartition("op.")[2] for name in stayed}
    if isinstance(config, VimConfig):
        assert ends == {"A_log", "D", "dt_proj.bias", "A_b_log", "D_b", "dt_proj_b.bias"}
    else:
        assert ends == {"A_logs", "Ds", "dt_projs_bias"}
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.float(), expected, rtol=0, atol=0.05 * expected.abs().max().item()
    )
