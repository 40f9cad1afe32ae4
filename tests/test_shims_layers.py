"""The layers of Mamba-2 without decoding, and of attention, of stand-ins, by their definitions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseport.exporter import shims
from fuseport.tests.test_shims_values import close, conv, rand

with shims.installed(shims.SHIMS):
    from mamba_ssm import Mamba2, MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.modules.mamba2_simple import Mamba2Simple
    from mamba_ssm.modules.mha import MHA
    from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
    from mamba_ssm.utils.generation import InferenceParams


def test_a_simple_mamba2_layer_is_one_that_begins_from_learned_states() -> None:
    options: dict[str, Any] = {"headdim": 4, "ngroups": 2}
    layer = Mamba2Simple(8, 4, learnable_init_states=True, **options).double()
    plain = Mamba2(8, 4, **options).double()
    unknown = plain.load_state_dict(layer.state_dict(), strict=False)
    assert unknown.unexpected_keys == ["init_states"]
    assert not unknown.missing_keys
    x = rand(2, 5, 8)
    close(layer(x), plain(x))  # from zeros
    with torch.no_grad():
        layer.init_states.copy_(rand(*layer.init_states.shape))
    z0, x0, z, xbc, dt = plain._split(plain.in_proj(x))
    xbc = conv(xbc.mT, plain.conv1d.weight.flatten(1), plain.conv1d.bias).mT
    steps, D = F.softplus(dt + plain.dt_bias), plain.D
    X, B, C = plain._coefficients(xbc)
    B, C = (t.repeat_interleave(2, 2) for t in (B, C))
    state, outs = layer.init_states.expand(2, -1, -1, -1), []
    for t in range(5):
        decay, drive = torch.exp(-steps[:, t] * plain.A_log.exp()), steps[:, t, :, None] * X[:, t]
        state = decay[..., None, None] * state + drive[..., None] * B[:, t, :, None]
        outs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * X[:, t])
    y = torch.stack(outs, 1).flatten(-2)
    close(layer(x), plain._ended(y, z, z0, x0))
    whole = Mamba2Simple(8, 4, learnable_init_states=True, use_mem_eff_path=False, **options)
    whole.double().load_state_dict(layer.state_dict())
    gated = y * F.silu(z)
    normal = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(whole(x), whole.out_proj(normal * whole.norm.weight))


@pytest.mark.parametrize("kind", [Mamba2, Mamba2Simple])
@pytest.mark.parametrize("norm", [True, False])
def test_packed_sequences_are_those_run_apart(kind: Any, norm: bool) -> None:
    """Values and gradients of both of Mamba-2's layers."""
    gated = {"rmsnorm": norm} if kind is Mamba2 else {"use_mem_eff_path": norm}
    layer = kind(8, 4, headdim=4, ngroups=2, **gated).double()
    x, weight = rand(2, 9, 8).requires_grad_(), rand(2, 9, 8)
    numbers = torch.tensor([0, 0, 1, 1, 1, 1, 2, 0, 0], dtype=torch.int32).expand(2, -1)
    wanted = (x, *layer.parameters())
    together = layer(x, seq_idx=numbers)
    apart = torch.cat([layer(part) for part in x.split([2, 4, 1, 2], 1)], 1)
    close(together, apart)
    for ours, theirs in zip(
        *(torch.autograd.grad(y, wanted, weight) for y in (together, apart)), strict=True
    ):
        close(ours, theirs)


def test_decoding_packed_sequences_is_refused() -> None:
    layer = Mamba2(8, 4, headdim=4, layer_idx=0)
    with pytest.raises(NotImplementedError, match="packed"):
        layer(
            torch.zeros(1, 2, 8),
            seq_idx=torch.zeros(1, 2),
            inference_params=InferenceParams(max_seqlen=2, max_batch_size=1),
        )


@pytest.mark.parametrize("started", [True, False])
def test_the_scan_of_the_papers_listing_by_its_definition(started: bool) -> None:
    X, A, B, C = rand(2, 6, 3, 4), -rand(2, 6, 3).exp(), rand(2, 6, 3, 5), rand(2, 6, 3, 5)
    initial = rand(2, 1, 3, 4, 5) if started else None
    state, outs = rand(2, 3, 4, 5) * 0 if initial is None else initial[:, 0], []
    for t in range(6):
        state = A[:, t, :, None, None].exp() * state + X[:, t, ..., None] * B[:, t, :, None]
        outs.append((state * C[:, t, :, None]).sum(-1))
    Y, last = ssd_minimal_discrete(X, A, B, C, 3, initial)
    close(Y, torch.stack(outs, 1))
    close(last, state)


def test_attention_by_its_definition() -> None:
    layer = MHA(12, 6, 2, mlp_dim=256, causal=True, d_conv=3, rotary_emb_dim=2).double()
    x = rand(2, 5, 12)
    qkv, beside = layer.in_proj(x).split([20, 256], -1)
    qkv = conv(qkv.mT, layer.conv1d.weight.flatten(1), layer.conv1d.bias, silu=False).mT
    q, k, v = qkv.unflatten(-1, (10, 2)).split([6, 2, 2], 2)
    turn = torch.exp(1j * torch.arange(5.0).double())[:, None]  # one pair, of the frequency 1
    q, k = (torch.complex(t[..., 0], t[..., 1]) * turn for t in (q, k))
    k, v = k.repeat_interleave(3, 2), v.repeat_interleave(3, 2)
    scores = torch.einsum("bihc,bjhc->bhij", *(torch.view_as_real(t) for t in (q, k))) / 2**0.5
    scores = scores + torch.full((5, 5), -torch.inf).triu(1)
    y = torch.einsum("bhij,bjhc->bihc", scores.softmax(-1), v).flatten(-2)
    gated = beside[..., :128] * F.silu(beside[..., 128:])
    close(layer(x), layer.out_proj(torch.cat([y, gated], -1)))
    with pytest.raises(NotImplementedError, match="does not decode"):
        layer(x, inference_params=InferenceParams(5, 2))
    with pytest.raises(ValueError, match="6 heads do not fit"):
        MHA(13, 6)


def test_a_hybrid_has_layers_of_attention_where_its_config_says() -> None:
    attention = {"num_heads": 2, "causal": True, "head_dim": 4, "rotary_emb_dim": 4}
    config = MambaConfig(
        8, 0, 3, 20, {"layer": "Mamba2", "d_state": 4, "headdim": 4}, [1], attention
    )
    model = MambaLMHeadModel(config)
    kinds = [type(layer.mixer) for layer in model.backbone.layers]
    assert kinds == [Mamba2, MHA, Mamba2]
    ids = torch.arange(6)[None]
    logits = model(ids).logits
    changed = model(torch.cat([ids[:, :5], ids[:, :1]], 1)).logits
    close(logits[:, :5], changed[:, :5], 1e-6)
    assert not torch.equal(logits, changed)
