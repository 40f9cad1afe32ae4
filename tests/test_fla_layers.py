"""What stands for kernels in flash-linear-attention's modules: norms, filters, gates, losses."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.test_fla import B, G, H, L, agree, rand

with shims.installed():
    from fla import modules
    from fla.modules import activations, layernorm, layernorm_gated, rotary
    from fla.modules.fused_cross_entropy import cross_entropy_loss
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
    from fla.modules.l2norm import l2norm
    from fla.modules.token_shift import token_shift, token_shift_ref


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def with_residual(
    function: Callable[..., Any], reference: Callable[..., Any], **options: Any
) -> None:
    given = {"x": rand(B, L, 8), "weight": rand(8), "bias": rand(8)}
    agree(
        lambda **given: function(**given, **options),
        lambda **given: reference(**given, **options),
        **given,
    )
    given["residual"] = rand(B, L, 8)
    agree(
        lambda **given: function(**given, **options, prenorm=True),
        lambda **given: reference(**given, **options, prenorm=True),
        **given,
    )
    agree(
        lambda x, weight: function(x, weight, None, **options),
        lambda x, weight: reference(x, weight, None, **options),
        x=given["x"],
        weight=given["weight"],
    )


def test_norms() -> None:
    with_residual(layernorm.layer_norm, layernorm.layer_norm_ref)
    with_residual(layernorm.rms_norm, layernorm.rms_norm_ref)
    for is_rms_norm in (True, False):
        options = {"num_groups": 2, "is_rms_norm": is_rms_norm}
        with_residual(layernorm.group_norm, layernorm.group_norm_ref, **options)
    agree(l2norm, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), x=rand(B, L, 8))


def test_norms_return_the_sum_in_the_dtype_of_the_residual() -> None:
    x, residual = torch.randn(2, 8).bfloat16(), torch.randn(2, 8)
    weight = torch.ones(8)
    out, total = layernorm.rms_norm(x, weight, None, residual=residual, prenorm=True)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    out, total = layernorm.rms_norm(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(total, x.float(), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("kind", ["RMS", "Layer"])
def test_norms_with_a_gate(kind: str, activation: str) -> None:
    module = getattr(modules, f"Fused{kind}NormGated")(8, activation=activation, eps=1e-3).double()
    reference = {"RMS": layernorm.rms_norm_ref, "Layer": layernorm.layer_norm_ref}[kind]
    act = F.silu if activation == "swish" else torch.sigmoid
    agree(
        lambda x, g, weight: torch.func.functional_call(module, {"weight": weight}, (x, g)),
        lambda x, g, weight: reference(x, weight, None, eps=1e-3) * act(g),
        x=rand(B, L, 8),
        g=rand(B, L, 8),
        weight=rand(8),
    )


def test_linear_layers_after_a_norm() -> None:
    given = {"x": rand(B, L, 8), "scale": rand(8), "weight": rand(3, 8), "g": rand(B, L, 8)}

    def theirs(x: Tensor, scale: Tensor, weight: Tensor, g: Tensor) -> Tensor:
        total = F.linear(layernorm.rms_norm_ref(x, scale, None), weight)
        total = total + F.linear(layernorm.layer_norm_ref(x, scale, None), weight)
        grouped = layernorm.group_norm_ref(x, scale, None, 4)
        total = total + F.linear(grouped, weight)
        return total + F.linear(
            layernorm.rms_norm_ref(x, scale, None, eps=1e-6) * F.silu(g), weight
        )

    def ours(x: Tensor, scale: Tensor, weight: Tensor, g: Tensor) -> Tensor:
        total = layernorm.rms_norm_linear(x, scale, None, weight, None)
        total = total + layernorm.layer_norm_linear(x, scale, None, weight, None)
        total = total + layernorm.group_norm_linear(x, scale, None, weight, None, num_groups=4)
        gate = modules.fused_norm_gate.rms_norm_swish_gate_linear
        return total + gate(x, g, scale, None, weight, None)

    agree(ours, theirs, **given)


@pytest.mark.parametrize("before", [True, False])
def test_grouped_norms_of_mamba(before: bool) -> None:
    options = {"group_size": 4, "norm_before_gate": before}
    agree(
        lambda **given: layernorm_gated.rmsnorm_fn(**given, **options),
        lambda **given: layernorm_gated.rms_norm_ref(**given, **options, upcast=False),
        x=rand(B, L, 8),
        z=rand(B, L, 8),
        weight=rand(8),
        bias=rand(8),
    )


def test_short_convolutions_and_their_states() -> None:
    module = modules.ShortConvolution(4, 3, bias=True, activation="silu").double()
    x, before = rand(B, L, 4), rand(B, 4, 3)

    def theirs(x: Tensor, before: Tensor) -> Any:
        every = torch.cat([before, x.mT], 2)
        out = F.conv1d(every[..., 1:], module.weight, module.bias, groups=4)
        return F.silu(out).mT, every[..., -3:]

    agree(
        lambda x, before: module(x, cache=before, output_final_state=True),
        theirs,
        x=x,
        before=before,
    )
    zeros = torch.zeros_like(before)
    agree(lambda x: module(x, output_final_state=True), lambda x: theirs(x, zeros), x=x)
    with torch.no_grad():
        out, cache = module(x[:, :1], cache=before.clone(), output_final_state=True)
        torch.testing.assert_close([out, cache], list(theirs(x[:, :1], before)))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_embeddings(interleaved: bool) -> None:
    module = modules.RotaryEmbedding(4, interleaved=interleaved).double()
    angles = torch.outer(torch.arange(3, 3 + L).double(), module.inv_freq.double())
    cos, sin = angles.cos(), angles.sin()

    def theirs(q: Tensor, k: Tensor) -> Any:
        return tuple(rotary.rotary_embedding_ref(t, cos, sin, interleaved) for t in (q, k))

    q, k = rand(B, L, H, 6), rand(B, L, G, 6)
    agree(lambda q, k: module(q, k, seqlen_offset=3), theirs, q=q, k=k)
    table = torch.outer(torch.arange(20).double(), module.inv_freq.double())
    rows = torch.tensor([3, 3])
    for offset in (3, rows):
        agree(
            lambda q, k, offset=offset: tuple(
                rotary.rotary_embedding(t, table.cos(), table.sin(), interleaved, False, offset)
                for t in (q, k)
            ),
            theirs,
            q=q,
            k=k,
        )
        agree(lambda q, k, offset=offset: module(q, k, offset, max_seqlen=20), theirs, q=q, k=k)


ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "sigmoid": lambda x: x.sigmoid(),
    "swish": lambda x: F.silu(x),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "sqrelu": lambda x: F.relu(x) ** 2,
    "elu_p1": lambda x: F.elu(x) + 1,
    "fast_gelu_impl": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    function = getattr(activations, name)
    agree(lambda x: function(x), ACTIVATIONS[name], x=rand(B, 8))


def test_activations_that_are_looked_up() -> None:
    for name in ("silu", "swish", "sigmoid", "sqrelu", "gelu"):
        given = "fast_gelu_impl" if name == "gelu" else name.replace("silu", "swish")
        function = activations.ACT2FN[name]
        agree(lambda x, function=function: function(x), ACTIVATIONS[given], x=rand(B, 8))


def test_gated_activations() -> None:
    x, y, weight, bias = rand(B, 8), rand(B, 8), rand(3, 8), rand(3)
    agree(lambda x, y: activations.swiglu(x, y), lambda x, y: F.silu(x) * y, x=x, y=y)
    agree(lambda x, y: activations.sigmoidglu(x, y), lambda x, y: x.sigmoid() * y, x=x, y=y)
    agree(
        activations.swiglu_linear,
        lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
        x=x,
        y=y,
        weight=weight,
        bias=bias,
    )
    agree(
        lambda x, y: activations.bias_gelu_impl(x, y),
        lambda x, y: F.gelu(x + y, approximate="tanh"),
        x=x,
        y=y,
    )


def test_token_shift() -> None:
    agree(token_shift, token_shift_ref, x=rand(B, L, 8))
    x, first = rand(B, L, 8), rand(B, 8)
    agree(
        lambda x, cache: token_shift(x, cache=cache, output_cache=True),
        lambda x, cache: (torch.cat([cache[:, None], x], 1)[:, :-1] - x, x[:, -1]),
        x=x,
        cache=first,
    )


def test_cross_entropies() -> None:
    logits, target = rand(7, 5), torch.tensor([0, 4, -100, 2, 1, 1, 3])
    x, weight, bias = rand(7, 6), rand(5, 6), rand(5)
    options = {"label_smoothing": 0.1, "logit_scale": 0.7, "logit_softcapping": 2.0}

    def values(logits: Tensor) -> Tensor:
        return 2.0 * torch.tanh(0.7 * logits / 2.0)

    def theirs(logits: Tensor) -> Any:
        capped = values(logits)
        square = 0.3 * torch.logsumexp(capped, 1).square() * (target != -100)
        loss = F.cross_entropy(capped, target, label_smoothing=0.1, reduction="none")
        return loss + square, square.detach()

    def mean(logits: Tensor) -> Any:
        total, square = theirs(logits)
        return total.sum() / 6, square.sum() / 6

    agree(
        lambda logits: cross_entropy_loss(logits, target, lse_square_scale=0.3, **options),
        theirs,
        logits=logits,
    )
    module = modules.FusedCrossEntropyLoss(lse_square_scale=0.3, return_z_loss=True, **options)
    agree(lambda logits: module(logits, target), mean, logits=logits)
    plain = modules.FusedCrossEntropyLoss(reduction="sum")
    agree(
        lambda logits: plain(logits, target),
        lambda logits: F.cross_entropy(logits, target, reduction="sum"),
        logits=logits,
    )
    agree(
        lambda x, weight, bias: fused_linear_cross_entropy_loss(x, target, weight, bias, **options),
        lambda x, weight, bias: F.cross_entropy(
            values(F.linear(x, weight, bias)), target, label_smoothing=0.1
        ),
        x=x,
        weight=weight,
        bias=bias,
    )
