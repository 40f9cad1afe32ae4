"""RWKV-7 of flash-linear-attention: its delta rule, what its layers fuse, packed sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import api, shims
from fuseport.tests.test_fla import B, H, K, L, V, agree, rand, unit
from fuseport.tests.test_fla_models import saved
from fuseport.tests.test_fla_packed import ENDS, check

with shims.installed():
    from fla.modules import token_shift
    from fla.ops import generalized_delta_rule, rwkv7
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.generalized_delta_rule.iplr.naive import iplr_recurrence
    from fla.ops.rwkv7 import (
        channel_mixing,
        fused_addcmul,
        fused_k_update,
        gate_output_correction,
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mixed(batch: int = B) -> dict[str, Tensor]:
    """What reads and writes is a key of length 1 and rates of it."""
    return {
        "q": rand(batch, L, H, K),
        "k": rand(batch, L, H, K),
        "v": rand(batch, L, H, V),
        "kk": unit(batch, L, H, K),
        "rates": rand(batch, L, H, K),
        "decay": rand(batch, L, H, K),
    }


def called(function: Callable[..., Any], **rest: Any) -> Callable[..., Any]:
    """With a and b as layers make them, and a decay of 0 to 1."""

    def run(kk: Tensor, rates: Tensor, decay: Tensor, **given: Any) -> Any:
        return function(**given, a=-kk, b=kk * rates.sigmoid(), gk=F.logsigmoid(decay), **rest)

    return run


def naive(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reference with heads before time."""

    def run(a: Tensor, b: Tensor, initial_state: Tensor | None = None, **given: Any) -> Any:
        turned = {n: t.transpose(1, 2) for n, t in {**given, "alpha": a, "beta": b}.items()}
        out, last = function(**turned, initial_state=initial_state)
        return out.transpose(1, 2), last

    return run


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("started", [True, False])
def test_the_rule(way: str, started: bool) -> None:
    function = getattr(generalized_delta_rule, f"{way}_dplr_delta_rule")
    given = mixed()
    if started:
        given["initial_state"] = rand(B, H, K, V)
    ours = called(function, output_final_state=True)
    agree(ours, called(naive(dplr_recurrence)), **given)


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_the_rule_without_a_decay(way: str) -> None:
    function = getattr(generalized_delta_rule, f"{way}_iplr_delta_rule")

    def ours(decay: Tensor, **given: Any) -> Any:
        def without(gk: Tensor, **given: Any) -> Any:
            return function(**given, output_final_state=True)

        return called(without)(decay=decay.detach(), **given)

    def theirs(decay: Tensor, **given: Any) -> Any:
        def without(gk: Tensor, **given: Any) -> Any:
            return naive(iplr_recurrence)(**given)

        return called(without)(decay=decay.detach(), **given)

    agree(ours, theirs, **mixed(), initial_state=rand(B, H, K, V))


@pytest.mark.parametrize("name", ["chunk_rwkv7", "fused_recurrent_rwkv7"])
def test_as_layers_call_it(name: str) -> None:
    function = getattr(rwkv7, name)
    known = {"safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64}
    rest = {"scale": K**-0.5, "output_final_state": True} | (known if "chunk" in name else {})

    def ours(q: Tensor, gk: Tensor, **given: Any) -> Any:
        return function(r=q, w=gk, **given, **rest)

    agree(called(ours), called(naive(dplr_recurrence)), **mixed())


def test_by_one_key() -> None:
    def ours(q: Tensor, kk: Tensor, rates: Tensor, decay: Tensor, **given: Any) -> Any:
        rest = {"w": F.logsigmoid(decay), "a": rates.sigmoid(), "scale": K**-0.5}
        return rwkv7.fused_mul_recurrent_rwkv7(r=q, kk=kk, **given, **rest, output_final_state=True)

    given = mixed() | {"initial_state": rand(B, H, K, V)}
    agree(ours, called(naive(dplr_recurrence)), **given)


def test_its_scale_is_1_where_none_is_said() -> None:
    x = {n: t.detach() for n, t in mixed().items()}
    rates, decay = x.pop("rates").sigmoid(), F.logsigmoid(x.pop("decay"))
    x["r"] = x.pop("q")
    found, state = rwkv7.fused_mul_recurrent_rwkv7(**x, w=decay, a=rates)
    assert state is None
    expected, _ = rwkv7.fused_mul_recurrent_rwkv7(**x, w=decay, a=rates, scale=1.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"])
def test_packed_sequences_are_apart(name: str) -> None:
    check(called(getattr(generalized_delta_rule, name)), **mixed(1))


def test_steps_before_of_packed_sequences_are_apart() -> None:
    def shifted(x: Tensor, **ends: Any) -> tuple[Tensor]:
        return (token_shift.token_shift(x, **ends),)

    check(shifted, x=rand(1, L, K))
    x = torch.randn(1, L, K)
    _, last = token_shift.token_shift(x, ENDS, output_cache=True)
    torch.testing.assert_close(last, x[0, ENDS[1:] - 1])
    with pytest.raises(NotImplementedError, match="with cu_seqlens, and states"):
        token_shift.token_shift(x, ENDS, cache=torch.zeros(3, K))


def test_states_of_packed_sequences_are_refused() -> None:
    x = torch.randn(1, L, 2, 8)
    with pytest.raises(NotImplementedError, match="with cu_seqlens, and states"):
        rwkv7.chunk_rwkv7(x, x, x, x, x, x, output_final_state=True, cu_seqlens=ENDS)
    with pytest.raises(NotImplementedError, match="was called with reverse"):
        rwkv7.fused_mul_recurrent_rwkv7(x, x, x, x, x, x, reverse=True)


@pytest.mark.parametrize("count", [5, 6])
def test_mixtures_of_a_step_and_the_one_before(count: int) -> None:
    names = ("xr", "xw", "xk", "xv", "xa", "xg")[:count]
    given = {"hidden_states": rand(B, L, K), "delta": rand(B, L, K)}
    given |= {name: rand(1, 1, K) for name in names}
    agree(fused_addcmul.fused_addcmul_rwkv7, fused_addcmul.torch_addcmul_rwkv7, **given)


def test_what_a_layer_fuses_beside_it() -> None:
    given = {"k": rand(B, L, K), "a": rand(B, L, K), "ka": rand(K)}
    agree(fused_k_update.fused_k_rwkv7, fused_k_update.k_update_ref, **given)
    given = {"o": rand(B, L, H * V), "g": rand(B, L, H * V), "v": rand(B, L, H, V)}
    given |= {"r": rand(B, L, H, K), "k": rand(B, L, H, K), "r_k": rand(H, K)}
    module = gate_output_correction
    agree(module.gate_output_correction, module.gate_output_correction_ref, **given)


@pytest.mark.parametrize("before", [(B, K), (B, 1, K)])
def test_channel_mixing(before: tuple[int, ...]) -> None:
    given = {"x": rand(B, L, K), "x_prev": rand(*before), "x_k": rand(1, 1, K)}
    given |= {"key_weight": rand(K, V), "value_weight": rand(V, K)}
    module = channel_mixing
    agree(module.channel_mixing_rwkv7, module.channel_mixing_rwkv7_torch, **given)


def test_halves_are_computed_in_float32() -> None:
    x = {n: t.detach().bfloat16() for n, t in mixed().items()}
    x["r"], w, a = x.pop("q"), F.logsigmoid(x.pop("decay")), x.pop("rates").sigmoid()
    out, _ = rwkv7.fused_mul_recurrent_rwkv7(**x, w=w, a=a)
    assert out.dtype == torch.bfloat16
    full = {n: t.float() for n, t in x.items()}
    expected, _ = rwkv7.fused_mul_recurrent_rwkv7(**full, w=w.float(), a=a.float())
    torch.testing.assert_close(out, expected.bfloat16())


def test_a_model_of_it_verifies(tmp_path: Path) -> None:
    """With a mask too: what it hides has no part in what comes later."""
    saved("rwkv7", tmp_path / "saved")
    shapes = "input_ids:int64[batch,length]<30,attention_mask:int64[batch,length]<2"
    api.export(tmp_path / "saved", tmp_path / "b", format="onnx", inputs=shapes)
    report = api.verify(tmp_path / "b", runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
