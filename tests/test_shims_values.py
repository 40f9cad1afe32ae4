"""What the stand-ins compute, against definitions written out in float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.ops import OPS
from fuseport.ops.ms_deform_attn import ms_deform_attn

with shims.installed(shims.SHIMS):
    import causal_conv1d
    import causal_conv1d_cuda
    import MultiScaleDeformableAttention
    import selective_scan_cuda
    import selective_scan_cuda_core
    import selective_scan_cuda_oflex
    import selective_scan_cuda_oflex_rh
    from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
    from mamba_ssm import Mamba, Mamba2, MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.ops import selective_scan_interface as interface
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.utils.generation import InferenceParams

torch.manual_seed(0)


def rand(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, **options)


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    bias: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Mamba-1's recurrence with groups and softplus, a step at a time: out, states, δ̂."""
    step = F.softplus(delta + bias[:, None], threshold=20.0)
    groups = u.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(groups, 1), C.repeat_interleave(groups, 1)
    state, outs, states = u.new_zeros(*u.shape[:2], A.shape[1]), [], []
    for t in range(u.shape[2]):
        moved = step[..., t, None]
        state = torch.exp(moved * A) * state + moved * u[..., t, None] * B[..., t]
        states.append(state)
        outs.append((state * C[..., t]).sum(-1) + D * u[..., t])
    out = torch.stack(outs, -1)
    return (out if z is None else out * F.silu(z)), states, step


def scan_inputs(length: int, d: int = 4, n: int = 3, groups: int = 2) -> list[Tensor]:
    b = 2
    return [
        rand(b, d, length),
        0.1 * rand(b, d, length),
        -torch.rand(d, n, dtype=torch.float64),
        rand(b, groups, n, length),
        rand(b, groups, n, length),
        rand(d),
        rand(b, d, length),
        rand(d),
    ]


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], seed: Tensor) -> list[Any]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves, seed))


@pytest.mark.parametrize("length", [1, 7, 64, 2048, 2050])
def test_fwd_saves_what_the_extension_saves(length: int) -> None:
    u, delta, A, B, C, D, z, bias = scan_inputs(length)
    expected, states, step = scan(u, delta, A, B, C, D, None, bias)
    out, x, out_z = selective_scan_cuda.fwd(u, delta, A, B, C, D, z, bias, True)
    close(out, expected)
    close(out_z, expected * F.silu(z))
    assert x.shape == (2, 4, math.ceil(length / 2048), 6)
    close(x[:, :, -1, 1::2], states[-1])
    close(x[:, :, 0, 1::2], states[min(length, 2048) - 1])
    close(x[:, :, -1, 0::2], torch.exp(step.sum(-1)[..., None] * A))
    assert len(selective_scan_cuda.fwd(u, delta, A, B, C, None, None, None, False)) == 2


def test_bwd_gives_the_gradients_in_the_extensions_order() -> None:
    inputs = scan_inputs(9)
    u, delta, A, B, C, D, z, bias = inputs
    dout = rand(2, 4, 9)
    truth = gradients(lambda *t: scan(*t)[0], inputs, dout)
    room = torch.empty_like(z)
    found = selective_scan_cuda.bwd(
        u, delta, A, B, C, D, z, bias, dout, None, None, room, True, True
    )
    of_z, of_bias = truth[6:]
    for mine, exact in zip(found, [*truth[:6], of_bias, of_z, scan(*inputs)[0]], strict=True):
        close(mine, exact)
    close(room, of_z)
    without = selective_scan_cuda.bwd(
        u, delta, A, B, C, None, None, None, dout, None, None, None, True, False
    )
    assert len(without) == 7
    assert without[5] is None
    assert without[6] is None


@pytest.mark.parametrize("extension", [selective_scan_cuda_oflex, selective_scan_cuda_core])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_vmambas_extensions_broadcast_delta(extension: Any, rows: int) -> None:
    u, delta, A, B, C, D, _, bias = scan_inputs(7)
    delta, bias = delta[:, :rows], bias[:rows]

    def definition(u: Tensor, delta: Tensor, *rest: Tensor) -> Tensor:
        *middle, bias = rest
        wide = [delta.repeat_interleave(4 // rows, 1), bias.repeat_interleave(4 // rows, 0)]
        return scan(u, wide[0], *middle, None, wide[1])[0]  # type: ignore[call-arg]

    inputs = [u, delta, A, B, C, D, bias]
    last = (1, True) if extension is selective_scan_cuda_oflex else (1,)
    out, x = extension.fwd(*inputs, True, *last)
    close(out, definition(*inputs))
    dout = rand(*u.shape)
    for mine, exact in zip(
        extension.bwd(*inputs, dout, x, True, 1), gradients(definition, inputs, dout), strict=True
    ):
        close(mine, exact)


def test_oflex_gives_float32_from_half_unrounded() -> None:
    u, delta, A, B, C, D, _, bias = scan_inputs(7)
    half = [t.bfloat16() for t in (u, delta, B, C)]
    single = [t.float() for t in (A, D, bias)]
    inputs = [half[0], half[1], single[0], half[2], half[3], single[1], single[2]]
    out, _ = selective_scan_cuda_oflex.fwd(*inputs, True, 1, True)
    assert out.dtype == torch.float32
    wide: list[Any] = [t.double() for t in inputs]
    exact = scan(*wide[:6], None, wide[6])[0]
    close(out.double(), exact, 1e-4)
    rounded, x = selective_scan_cuda_oflex.fwd(*inputs, True, 1, False)
    assert rounded.dtype == torch.bfloat16
    found = selective_scan_cuda_oflex.bwd(*inputs, out, x, True, 1)
    assert [g.dtype for g in found] == [t.dtype for t in inputs]
    with pytest.raises(ValueError, match="real A"):
        selective_scan_cuda_oflex.fwd(*inputs[:3], half[2][:, 0], *inputs[4:], True, 1, True)


@pytest.mark.parametrize("states", [1, 3])
def test_spatial_mambas_extension_gives_the_states(states: int) -> None:
    u, delta, A, B, C, D, _, bias = scan_inputs(7)
    A, B, C = A[:, :states], B[:, :, :states], C[:, :, :states]

    def definition(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, bias: Tensor) -> Tensor:
        return torch.stack(scan(u, delta, A, B, C, D, None, bias)[1], -1)

    inputs = [u, delta, A, B, bias]
    out, x = selective_scan_cuda_oflex_rh.fwd(*inputs[:4], D, bias, True, 1, True)
    assert out.shape == (2, 4, states, 7)
    close(out, definition(*inputs))
    close(x[:, :, -1, 1::2], out[..., -1])
    dout = rand(2, 4, states, 7)
    *most, dD, dbias = selective_scan_cuda_oflex_rh.bwd(*inputs[:4], D, bias, dout, x, True, 1)
    truth = gradients(definition, inputs, dout)
    for mine, exact in zip([*most, dbias], truth, strict=True):
        close(mine, exact)
    assert torch.equal(dD, torch.zeros_like(D))
    without = selective_scan_cuda_oflex_rh.bwd(*inputs[:4], None, None, dout, x, True, 1)
    assert without[4] is None
    assert without[5] is None
    half = [t.bfloat16() for t in (u, delta)] + [A.float(), B.bfloat16(), None, bias.float()]
    kinds = [selective_scan_cuda_oflex_rh.fwd(*half, True, 1, w)[0].dtype for w in (True, False)]
    assert kinds == [torch.float32, torch.bfloat16]


def conv(x: Tensor, weight: Tensor, bias: Tensor, silu: bool = True) -> Tensor:
    out = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))
    return F.silu(out) if silu else out


@pytest.mark.parametrize("between", [0, 1, 3, 4])
def test_the_convolution_as_each_version_calls_it(between: int) -> None:
    x, weight, bias, dout = rand(2, 3, 5), rand(3, 4), rand(3), rand(2, 3, 5)
    exact = conv(x, weight, bias)
    truth = gradients(conv, [x, weight, bias], dout)
    extension = causal_conv1d_cuda
    if between == 4:
        out, room = torch.empty_like(x), [torch.empty_like(t) for t in (x, weight, bias)]
        extension.causal_conv1d_fwd(x, weight, bias, None, None, out, None, True)
        extension.causal_conv1d_bwd(x, weight, bias, dout, None, None, None, *room, None, True)
        found = room
    else:
        out = extension.causal_conv1d_fwd(x, weight, bias, *[None] * between, True)
        rest = {0: [None], 1: [None, None], 3: [None] * 4 + [False]}[between]
        found = extension.causal_conv1d_bwd(x, weight, bias, dout, *rest, True)[:3]
    close(out, exact)
    for mine, its in zip(found, truth, strict=True):
        close(mine, its)


def test_the_convolutions_functions() -> None:
    x, weight, bias = rand(2, 3, 5), rand(3, 4), rand(3)
    close(
        causal_conv1d.causal_conv1d_fn(x, weight, bias, activation="swish"), conv(x, weight, bias)
    )
    room = rand(2, 3, 3)
    out, states = causal_conv1d.causal_conv1d_fn(
        x, weight, bias, return_final_states=True, final_states_out=room
    )
    close(out, conv(x, weight, bias, silu=False))
    assert states is room
    close(room, x[..., -3:])
    with pytest.raises(NotImplementedError, match="relu"):
        causal_conv1d.causal_conv1d_fn(x, weight, bias, activation="relu")
    pool = rand(5, 3, 4)
    rows = torch.tensor([3, 1], dtype=torch.int32)
    before = pool.clone()
    step = causal_conv1d.causal_conv1d_update(
        x[..., 0], pool, weight, bias, conv_state_indices=rows
    )
    seen = torch.cat([before[[3, 1]][..., 1:], x[..., :1]], -1)
    close(step, (seen * weight).sum(-1) + bias)
    close(pool[[3, 1]], seen)
    close(pool[[0, 2, 4]], before[[0, 2, 4]])
    packed = causal_conv1d_varlen_states(rand(7, 2), torch.tensor([0, 2, 7]), 3)
    assert packed.shape == (2, 2, 3)
    assert (packed[0, :, 0] == 0).all()


def test_the_functions_of_the_scan() -> None:
    u, delta, A, B, C, D, z, bias = inputs = scan_inputs(6)
    out, last = interface.selective_scan_fn(u, delta, A, B, C, D, z, bias, True, True)
    exact, states, _ = scan(*inputs)
    close(out, exact)
    close(last, states[-1])
    state = rand(5, 4, 3)
    rows = torch.tensor([4, 0])
    before = state.clone()
    token = [u[..., 0], delta[..., 0], A, B[:, :, :, 0], C[:, :, :, 0], D, z[..., 0], bias]
    one = [t.unsqueeze(1) if t.dim() == 2 and len(t) == 2 else t for t in token]
    got = selective_state_update(
        state[:, None].clone(), one[0], one[1], A[None], one[3][:, :1], one[4][:, :1], D[None],
        one[6], bias[None], True, state_batch_indices=rows,
    )  # fmt: skip
    moved = F.softplus(token[1] + bias)[..., None]
    new = torch.exp(moved * A) * before[rows] + moved * token[0][..., None] * token[3][:, :1]
    exact_step = ((new * token[4][:, :1]).sum(-1) + D * token[0]) * F.silu(token[6])
    close(got[:, 0], exact_step)


@pytest.mark.parametrize("rms", [False, True])
def test_a_norm_that_adds_first(rms: bool) -> None:
    x, residual, x1, rows = rand(2, 3, 8), rand(2, 3, 8), rand(2, 3, 8), rand(2, 3)
    weight, bias, weight1 = rand(8), rand(8), rand(8)

    def definition(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total = x + residual
        centred = total if rms else total - total.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    inputs = [x, residual, weight, bias]

    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = layer_norm.layer_norm_fn(x, weight, bias, residual, eps=1e-5, is_rms_norm=rms)
        return out

    close(norm(*inputs), definition(*inputs))
    seed = rand(2, 3, 8)
    for mine, exact in zip(
        gradients(norm, inputs, seed), gradients(definition, inputs, seed), strict=True
    ):
        close(mine, exact)
    first, second, total = layer_norm.layer_norm_fn(
        x, weight, bias, residual, x1, weight1, None, 1e-5, 0.0, None, True, is_rms_norm=rms
    )
    close(first, definition(x + x1, residual, weight, bias))
    close(second, definition(x + x1, residual, weight1, 0 * bias))
    close(total, x + x1 + residual)
    scaled = layer_norm.layer_norm_fn(x, weight, bias, eps=1e-5, rowscale=rows, is_rms_norm=rms)
    close(scaled, definition(x * rows[..., None], 0 * x, weight, bias))
    half, kept = layer_norm.rms_norm_fn(
        x.bfloat16(), weight.bfloat16(), None, prenorm=True, residual_in_fp32=True
    )
    assert (half.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(NotImplementedError, match="dropout masks"):
        layer_norm.layer_norm_fn(x, weight, bias, return_dropout_mask=True)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("cls", [layernorm_gated.RMSNorm, layernorm_gated.LayerNorm])
def test_a_norm_with_a_gate(cls: Any, before: bool) -> None:
    norm = cls(8, group_size=4, norm_before_gate=before, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, z = rand(2, 3, 8), rand(2, 3, 8)
    value = (x if before else x * F.silu(z)).unflatten(-1, (2, 4))
    if cls is layernorm_gated.LayerNorm:
        torch.nn.init.normal_(norm.bias)
        value = value - value.mean(-1, keepdim=True)
    value = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = value.flatten(-2) * norm.weight + (0 if norm.bias is None else norm.bias)
    close(norm(x, z), exact * F.silu(z) if before else exact)


def block_of(layer: Any, suffix: str, xz: Tensor) -> Tensor:
    """Mamba-1 between its projections, by its definition; (b, d, l)."""
    part = {name: getattr(layer, name + suffix) for name in ("conv1d", "x_proj", "dt_proj", "D")}
    A_log = getattr(layer, f"A{suffix}_log")
    x, z = xz.chunk(2, 1)
    x = conv(x, part["conv1d"].weight[:, 0], part["conv1d"].bias)
    dt, B, C = part["x_proj"](x.mT).split([layer.dt_rank, layer.d_state, layer.d_state], -1)
    delta = (dt @ part["dt_proj"].weight.mT).mT
    bias = part["dt_proj"].bias
    return scan(x, delta, -A_log.exp(), B.mT[:, None], C.mT[:, None], part["D"], z, bias)[0]


@pytest.mark.parametrize("kind", ["none", "v1", "v2"])
def test_a_mamba_layer_and_that_of_vims_fork(kind: str) -> None:
    layer = Mamba(6, 4, bimamba_type=kind, if_divide_out=True, init_layer_scale=0.5).double()
    names = dict(layer.named_parameters())
    assert ("A_b_log" in names) == (kind != "none")
    assert ("conv1d_b.weight" in names) == ("D_b" in names) == (kind == "v2")
    x = rand(2, 5, 6)
    xz = layer.in_proj(x).mT
    out = block_of(layer, "", xz)
    if kind == "v2":
        out = (out + block_of(layer, "_b", xz.flip(-1)).flip(-1)) / 2
    if kind == "v1":
        inner, z = xz.chunk(2, 1)
        u = conv(inner, layer.conv1d.weight[:, 0], layer.conv1d.bias)
        dt, B, C = layer.x_proj(u.mT).split([layer.dt_rank, 4, 4], -1)
        delta = (dt @ layer.dt_proj.weight.mT).mT
        turned = [t.flip(-1) for t in (u, delta, B.mT[:, None], C.mT[:, None], z)]
        back = scan(
            turned[0], turned[1], -layer.A_b_log.exp(), turned[2], turned[3], layer.D, turned[4],
            layer.dt_proj.bias,
        )  # fmt: skip
        out = out + back[0].flip(-1)
    close(layer(x), layer.out_proj(out.mT) * 0.5)


def test_deformable_attention_as_its_extension_has_it() -> None:
    case = next(case for case in OPS["ms_deform_attn"].cases if case.name == "plain")
    inputs = case.make(torch.float32, 3)
    floating = [t.requires_grad_() for t in inputs.values() if t.is_floating_point()]
    out = MultiScaleDeformableAttention.ms_deform_attn_forward(*inputs.values(), 64)
    exact = ms_deform_attn(*inputs.values())
    assert torch.equal(out, exact)
    dout = torch.randn_like(out)
    given = [t.detach() for t in inputs.values()]
    found = MultiScaleDeformableAttention.ms_deform_attn_backward(*given, dout, 64)
    for mine, right in zip(found, torch.autograd.grad(exact, floating, dout), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize(("options", "mean_of"), [({"nslices": 3}, 1), ({"nframes": 3}, 3)])
def test_a_mamba_layer_across_slices(options: dict[str, int], mean_of: int) -> None:
    layer = Mamba(6, 4, bimamba_type="v3", **options).double()
    x = rand(2, 12, 6)
    xz = layer.in_proj(x).mT
    there = [4 * s + i for i in range(4) for s in range(3)]  # the first steps of all slices first
    back = [there.index(t) for t in range(12)]
    out = block_of(layer, "", xz) + block_of(layer, "_b", xz.flip(-1)).flip(-1)
    out = out + block_of(layer, "_s", xz[..., there])[..., back]
    close(layer(x), layer.out_proj(out.mT / mean_of))


def test_a_mamba_layer_of_videomamba_and_one_that_nobody_knows() -> None:
    both = [Mamba(6, 4, **options) for options in ({"bimamba": True}, {"bimamba_type": "v2"})]
    assert both[0].state_dict().keys() == both[1].state_dict().keys()
    assert both[0].bimamba_type == "v2"
    with pytest.raises(NotImplementedError, match="v9"):
        Mamba(6, 4, bimamba_type="v9")


def test_a_mamba_layer_of_audio_mamba_spells_an_option_otherwise() -> None:
    layers = [
        Mamba(6, 4, bimamba_type="v2", **{name: True}).double()
        for name in ("if_divide_out", "if_devide_out")
    ]
    layers.append(Mamba(6, 4, bimamba_type="v2").double())
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    x = rand(2, 5, 6)
    close(layers[1](x), layers[0](x))
    close(layers[2](x), 2 * layers[0](x))


@pytest.mark.parametrize(
    "layer",
    [
        Mamba(6, 4, layer_idx=0),
        Mamba2(8, 4, headdim=4, ngroups=2, layer_idx=0),
        Mamba2(8, 4, headdim=4, d_ssm=8, D_has_hdim=True, rmsnorm=False, layer_idx=0),
    ],
    ids=["mamba", "mamba2", "mamba2 with an MLP"],
)
def test_decoding_gives_what_the_sequence_gives(layer: Any) -> None:
    layer = layer.double()
    x = rand(2, 6, layer.d_model)
    whole = layer(x)
    decoding = InferenceParams(6, 2)
    with torch.no_grad():
        parts = [layer(x[:, :3], inference_params=decoding)]
        for t in range(3, 6):
            decoding.seqlen_offset = t
            parts.append(layer(x[:, t : t + 1], inference_params=decoding))
    close(torch.cat(parts, 1), whole)


def test_a_private_part_says_so_when_it_is_called() -> None:
    module = layernorm_gated
    with pytest.raises(NotImplementedError, match=r"layernorm_gated\._layer_norm_fwd was called"):
        module._layer_norm_fwd()
    with pytest.raises(AttributeError, match="no attribute 'layer_norm_of_tomorrow'"):
        _ = module.layer_norm_of_tomorrow


def test_mamba2s_block_by_its_definition() -> None:
    heads, width, n, groups, beside = 4, 2, 3, 2, 3
    d, convolved = heads * width, heads * width + 2 * groups * n
    zxbcdt = rand(2, 5, 2 * beside + d + convolved + heads)
    weight, bias, dt_bias = rand(convolved, 4), rand(convolved), rand(heads)
    A, D, gain, last = -torch.rand(heads).double(), rand(heads), rand(d), rand(6, d + beside)
    found, final = ssd_combined.mamba_split_conv1d_scan_combined(
        zxbcdt, weight, bias, dt_bias, A, D, 256, return_final_states=True, rmsnorm_weight=gain,
        outproj_weight=last, headdim=width, ngroups=groups, norm_before_gate=False,
    )  # fmt: skip
    z0, x0, z, xbc, dt = zxbcdt.split([beside, beside, d, convolved, heads], -1)
    x, B, C = conv(xbc.mT, weight, bias).mT.split([d, groups * n, groups * n], -1)
    step = F.softplus(dt + dt_bias)
    x = x.unflatten(-1, (heads, width))
    B, C = (t.unflatten(-1, (groups, n)).repeat_interleave(2, 2) for t in (B, C))
    state, outs = torch.zeros(2, heads, width, n, dtype=torch.float64), []
    for t in range(5):
        decay, drive = torch.exp(step[:, t] * A), step[:, t, :, None] * x[:, t]
        state = decay[..., None, None] * state + drive[..., None] * B[:, t, :, None]
        outs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = (torch.stack(outs, 1).flatten(-2) * F.silu(z)).unflatten(-1, (groups, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2) * gain
    close(found, torch.cat([F.silu(z0) * x0, y], -1) @ last.mT)
    close(final, state)
    with pytest.raises(NotImplementedError, match="packed"):
        ssd_combined.mamba_chunk_scan_combined(
            x, dt, A, B, C, 8, cu_seqlens=torch.tensor([0, 5]), return_varlen_states=True
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_a_language_model(layer: str, fused: bool) -> None:
    options = {"layer": layer, "d_state": 4} | ({"headdim": 4} if layer == "Mamba2" else {})
    config = MambaConfig(8, 8, 2, 30, options, fused_add_norm=fused, rms_norm=fused)
    model = MambaLMHeadModel(config)
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert model.lm_head.weight.shape == (32, 8)
    ids = torch.randint(0, 30, (2, 5))
    logits = model(ids).logits
    assert logits.shape == (2, 5, 32)
    close(model(ids, num_last_tokens=2).logits, logits[:, -2:], 1e-5)
    with pytest.raises(RuntimeError, match="export the model"):
        model.generate(ids)
    with pytest.raises(RuntimeError, match="loads nothing"):
        MambaLMHeadModel.from_pretrained("state-spaces/mamba-130m")


def test_the_built_in_model_agrees_with_the_language_model() -> None:
    """The same weights in fuseport's own Mamba, whose values other tests hold to the paper."""
    from fuseport.exporter.models.mamba import MambaConfig as Own
    from fuseport.exporter.models.mamba import MambaLM

    theirs = MambaLMHeadModel(MambaConfig(8, 0, 2, 32, {"d_state": 4})).double()
    own = MambaLM(
        Own(d_model=8, n_layer=2, vocab_size=32, d_state=4, d_conv=4, d_inner=16, dt_rank=1)
    ).double()
    own.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 32, (2, 9))
    close(theirs(ids).logits, own(ids))
