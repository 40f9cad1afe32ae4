"""Mamba-3 of stand-ins: its layer, its decoding, and the files of a copy of mamba_ssm."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.ops.compositions.mamba3 import mamba3_siso
from fuseport.tests.ops.test_mamba3 import by_definition, cut, drawn
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    from mamba_ssm import Mamba3, MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.modules.mamba3 import heavy_tail_activation
    from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
    from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
    from mamba_ssm.ops.triton.mamba3.angle_dt import angle_dt_fwd
    from mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import (
        apply_rotary_qk_inference_fwd,
        apply_rotary_qk_inference_reference,
    )
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_step import mamba3_siso_step
    from mamba_ssm.utils.generation import InferenceParams

WIDTHS: dict[str, Any] = {"d_state": 8, "headdim": 3, "layer_idx": 0}
FORMS: dict[str, dict[str, Any]] = {
    "siso": {"ngroups": 2},
    "siso_whole_norm": {"rope_fraction": 1.0, "is_outproj_norm": True},
    "mimo": {"is_mimo": True, "mimo_rank": 3, "ngroups": 2},
    "mimo_norm": {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "A_floor": 0.9},
    "mimo_apart": {"is_mimo": True, "is_outproj_norm": True, "fuse_pregate_headwise_norm": False},
}


def layer_of(form: str) -> Any:
    """No parameter at a special value."""
    torch.manual_seed(0)
    layer = Mamba3(6, **WIDTHS, **FORMS[form]).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def of_its_parts(layer: Any, u: Tensor) -> Tensor:
    """The layer by the definition of its scan in a test of the ops."""
    d, H, N, G, R = 12, 4, 8, layer.num_bc_heads, layer.mimo_rank
    parts = [d, d, R * G * N, R * G * N, H, H, H, layer.num_rope_angles]
    z, x, B, C, dt, rate, trap, angles = layer.in_proj(u).split(parts, -1)

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        normal = t.unflatten(-1, (R, G, N))
        normal = normal / (normal.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        return normal.repeat_interleave(2 // G, 3)

    step = F.softplus(dt + layer.dt_bias)
    decay = torch.where(rate > 0, 1 + rate, 1 / (1 - rate.clamp(max=0)))
    by_head = z.unflatten(-1, (H, 3))
    given: dict[str, Any] = {
        "Q": norm(C, layer.C_norm.weight),
        "K": norm(B, layer.B_norm.weight),
        "V": x.unflatten(-1, (H, 3)),
        "ADT": -(decay.clamp(min=layer.A_floor) * step).mT,
        "DT": step.mT,
        "Trap": trap.mT,
        "Q_bias": layer.C_bias,
        "K_bias": layer.B_bias,
        "Angles": angles[:, :, None].expand(-1, -1, H, -1),
        "D": layer.D,
        "Z": by_head,
    }
    if layer.is_mimo:
        given |= {"MIMO_V": layer.mimo_x, "MIMO_Z": layer.mimo_z, "MIMO_Out": layer.mimo_o}
        if layer.is_outproj_norm:
            given["fuse_pregate_headwise_rms_norm"] = True
            given |= {"outproj_norm_weight": layer.norm.weight.view(H, 3), "outproj_norm_eps": 1e-5}
        return layer.out_proj(by_definition(**given)[0].flatten(-2))
    for name in ("Q", "K"):
        given[name] = given[name].squeeze(2)
    for name in ("Q_bias", "K_bias"):
        given[name] = given[name].squeeze(1)
    if layer.is_outproj_norm:
        y = by_definition(**{**given, "Z": None})[0]
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight.view(H, 3)
        return layer.out_proj((y * F.silu(by_head)).flatten(-2))
    return layer.out_proj(by_definition(**given)[0].flatten(-2))


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_by_its_definition(form: str) -> None:
    layer = layer_of(form)
    u = rand(2, 5, 6).requires_grad_()
    leaves = [u, *layer.parameters()]
    cotangent = rand(2, 5, 6)
    mine, right = layer(u), of_its_parts(layer, u)
    close(mine, right)
    grads = (torch.autograd.grad(out, leaves, cotangent) for out in (mine, right))
    for found, wanted in zip(*grads, strict=True):
        close(found, wanted, 1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_gives_what_the_sequence_gives(form: str) -> None:
    layer = layer_of(form)
    u = rand(2, 6, 6)
    whole = layer(u)
    decoding = InferenceParams(6, 2)
    with torch.no_grad():
        parts = [layer(u[:, :3], inference_params=decoding)]
        decoding.seqlen_offset = 3
        parts.append(layer(u[:, 3:4], inference_params=decoding))
        states = decoding.key_value_memory_dict[0]
        for t in (4, 5):
            out, *new = layer.step(u[:, t], *states)
            assert all(a is b for a, b in zip(new, states, strict=True))
            parts.append(out[:, None])
    close(torch.cat(parts, 1), whole)
    shapes = [s.shape for s in layer.allocate_inference_cache(2, 6)]
    assert shapes == [s.shape for s in states]


@pytest.mark.parametrize("form", ["siso", "mimo"])
def test_packed_sequences_are_decoded_on(form: str) -> None:
    layer = layer_of(form)
    u, starts, decoding = rand(1, 7, 6), torch.tensor([0, 3, 7]), InferenceParams(8, 2)
    with torch.no_grad():
        out = layer(u, cu_seqlens=starts, inference_params=decoding)
        close(out, layer(u, cu_seqlens=starts))
        close(out[:, 3:], layer(u[:, 3:]))
        decoding.seqlen_offset = 4
        more = rand(2, 1, 6)
        found = layer(more, inference_params=decoding)
        close(found[:1], layer(torch.cat([u[:, :3], more[:1]], 1))[:, -1:])
        close(found[1:], layer(torch.cat([u[:, 3:], more[1:]], 1))[:, -1:])


def test_initial_values_and_what_is_refused() -> None:
    layer = Mamba3(6, **WIDTHS, is_mimo=True, is_outproj_norm=True)
    step = F.softplus(layer.dt_bias)
    assert ((step > 0.00099) & (step < 0.101)).all()
    assert torch.equal(layer.mimo_x, torch.full((4, 4, 3), 0.25))
    assert torch.equal(layer.B_bias, torch.ones(4, 4, 8))
    assert layer.D._no_weight_decay
    assert layer.fuse_pregate_headwise_norm
    x = torch.tensor([-1.0, 0.0, 2.0])
    assert torch.equal(heavy_tail_activation(x), torch.tensor([0.5, 1.0, 3.0]))
    for options, reason in (
        ({"headdim": 5}, "headdim 5 does not divide 12"),
        ({"headdim": 3, "rope_fraction": 0.25}, "rope_fraction must be"),
        ({"headdim": 3, "d_state": 2}, "no pairs to turn"),
    ):
        with pytest.raises(ValueError, match=reason):
            Mamba3(6, **options)
    with pytest.raises(ValueError, match="Mamba3 needs a layer_idx to decode"):
        Mamba3(6, 8, headdim=3)(torch.zeros(1, 2, 6), inference_params=InferenceParams(6, 2))


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_step_in_parts_is_a_step(ranks: int | None) -> None:
    """As the layer of mamba_ssm itself decodes: the rotation first, then one kernel."""
    given = {k: t.detach() for k, t in drawn(ranks, 5).items()}
    right, last = by_definition(**given)
    before = by_definition(**cut(given, 0, 4))[1]
    angle, h, k, v = before
    one = {name: t[:, 4] for name, t in given.items() if name in ("Q", "K", "V", "Z", "Angles")}
    one |= {name: given[name][:, :, 4] for name in ("ADT", "DT", "Trap")}
    rank = (lambda t: t.unsqueeze(1)) if ranks is None else (lambda t: t)
    q, new_k = (rank(one[n]).repeat_interleave(2, 2) for n in "QK")
    biases = [rank(given[n]).transpose(0, 1) for n in ("Q_bias", "K_bias")]
    turn = (q, new_k, angle, one["Angles"], one["DT"], *biases)
    pairs = {"rotate_pairwise": ranks is None}
    q, new_k, angle = apply_rotary_qk_inference_fwd(*turn, **pairs)
    close(apply_rotary_qk_inference_reference(*turn, **pairs), (q, new_k, angle))
    back = apply_rotary_qk_inference_fwd(q, new_k, *turn[2:5], **pairs, conjugate=True)[1]
    close(back, rank(one["K"]).repeat_interleave(2, 2) + biases[1])
    close(angle.cos(), last[0].cos())
    ones = torch.ones(1, 4, 3).double()
    up, gate, down = (
        ones if ranks is None else given[n].transpose(0, 1)
        for n in ("MIMO_V", "MIMO_Z", "MIMO_Out")
    )
    out, state = torch.empty(2, 4, 3).double(), h.clone()
    step = (one["ADT"] / one["DT"], new_k, q, given["D"], one["V"], one["DT"])
    share = torch.sigmoid(one["Trap"])
    mamba3_step_fn(state, rank(k), v, *step, share, up, down, None, out, one["Z"], gate)
    close(out, right[:, 4])
    close(state, last[1])
    apart, kept = torch.empty(2, ranks or 1, 4, 3).double(), torch.empty_like(h)
    mamba3_step_fn(h, rank(k), v, *step, share, up, None, kept, apart)
    close((apart * F.silu(one["Z"][:, None] * gate) * down).sum(1), out)
    close(kept, state)
    if ranks is None:
        names = ("Q", "K", "V", "ADT", "DT", "Trap")
        rest = (given["Q_bias"], given["K_bias"], one["Angles"], given["D"], one["Z"])
        found, states = mamba3_siso_step(*(one[n] for n in names), *rest, before)
        close(found, out)
        close(states[1], state)
        with pytest.raises(ValueError, match="Input_States must be given"):
            mamba3_siso_step(*(one[n] for n in names), *rest)


def test_the_functions_are_those_of_the_compositions() -> None:
    given = {k: t.detach() for k, t in drawn(None, 5, 1).items()}
    starts = torch.tensor([0, 2, 2, 5])
    close(mamba3_siso_combined(**given), by_definition(**given)[0])
    states = mamba3_siso(**given, cu_seqlens=starts, return_final_states=True)
    sums, last = angle_dt_fwd(given["Angles"], given["DT"], None, 64, True, starts)
    close(last, states[1])
    close(sums[:, 4], last[2:])
    begin = rand(3, 4, 3).abs()
    more, end = angle_dt_fwd(given["Angles"], given["DT"], begin, 64, True, starts)
    close(end.cos(), (last + begin).cos())
    close(more[:, 1].cos(), (sums[:, 1] + begin[:1]).cos())
    plain = angle_dt_fwd(given["Angles"], given["DT"], begin[:1])
    close(plain.cos(), (angle_dt_fwd(given["Angles"], given["DT"]) + begin[:1, None]).cos())
    with pytest.raises(ValueError, match="packed in one row; got 2"):
        angle_dt_fwd(rand(2, 5, 4, 3), rand(2, 4, 5), cu_seqlens=starts)
    several = {k: t.detach() for k, t in drawn(3, 5).items()}
    out = mamba3_mimo(**several, chunk_size=8, rotary_dim_divisor=4, dtype=torch.bfloat16)
    close(out, by_definition(**several)[0])


@pytest.mark.parametrize("form", ["siso", "mimo_norm"])
def test_a_language_model(form: str) -> None:
    options = {"layer": "Mamba3", "d_state": 8, "headdim": 4, **FORMS[form], "ngroups": 1}
    model = MambaLMHeadModel(MambaConfig(8, 16, 2, 30, options, fused_add_norm=False)).double()
    assert [type(block.mixer) for block in model.backbone.layers] == [Mamba3, Mamba3]
    ids, decoding = torch.randint(0, 30, (2, 4)), InferenceParams(4, 2)
    whole = model(ids).logits
    with torch.no_grad():
        parts = [model(ids[:, :2], inference_params=decoding).logits]
        for t in (2, 3):
            decoding.seqlen_offset = t
            parts.append(model(ids[:, t : t + 1], inference_params=decoding).logits)
    close(torch.cat(parts, 1), whole)


FILES = {
    "triton": ["mamba3_siso_combined", "mamba3_mimo_rotary_step"],
    "tilelang": ["mamba3_mimo"],
    "cute": ["mamba3_step_fn"],
}
LAYER = """
try:
    from {0}.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
except ImportError:
    mamba3_mimo = None
from {0}.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
from {0}.ops.triton.mamba3.mamba3_mimo_rotary_step import apply_rotary_qk_inference_fwd
try:
    from {0}.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
except ImportError:
    mamba3_step_fn = None
"""
DEFINED = {
    "mamba3_siso_combined": "import triton\n\ndef mamba3_siso_combined(\n    Q,\n): pass\n",
    "mamba3_mimo_rotary_step": "import triton\n\n@triton.jit\ndef rotary_qk_inference_kernel(\n"
    "    Q,\n): pass\n\ndef apply_rotary_qk_inference_fwd(q): pass\n",
    "mamba3_mimo": "import tilelang\n\ndef mamba3_mimo(\n    Q,\n): pass\n",
    "mamba3_step_fn": "import cutlass\n\ndef mamba3_step_fn(\n    state,\n): pass\n",
}


@pytest.mark.skipif(find_spec("triton") is not None, reason="auto leaves a triton that is there")
@pytest.mark.parametrize("package", ["holder_of_3.mamba_ssm", "renamed_3"])
def test_the_files_of_a_copy_have_the_stand_ins(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path.joinpath(*package.split("."))
    for language, files in FILES.items():
        (folder / "ops" / language / "mamba3").mkdir(parents=True)
        for file in files:
            (folder / "ops" / language / "mamba3" / f"{file}.py").write_text(DEFINED[file])
    (folder / "layer.py").write_text(LAYER.format(package))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    try:
        with shims.installed("auto") as used:
            layer = importlib.import_module(f"{package}.layer")
        assert "mamba_ssm" in used
        given = {k: t.detach() for k, t in drawn(2, 3).items()}
        out = layer.mamba3_mimo(**given, chunk_size=8, rotary_dim_divisor=4, dtype=torch.float64)
        close(out, by_definition(**given)[0])
        assert layer.mamba3_step_fn is mamba3_step_fn
        assert layer.mamba3_siso_combined is mamba3_siso_combined
        assert layer.apply_rotary_qk_inference_fwd is apply_rotary_qk_inference_fwd
    finally:
        root = package.partition(".")[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == root]:
            del sys.modules[name]
