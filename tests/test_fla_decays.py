"""States of flash-linear-attention that decay: RWKV-6, HGRN, and how the delta rule rounds them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.test_fla import B, H, K, L, agree, mixer, ops, rand

with shims.installed():
    from fla.ops import hgrn
    from fla.ops.hgrn.naive import naive_recurrent_hgrn
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("started", [True, False])
def test_rwkv_6(way: str, started: bool) -> None:
    function = getattr(ops, f"{way}_rwkv6")

    def ours(decay: Tensor, **given: Any) -> Any:
        return function(**given, w=-decay.exp(), output_final_state=True)

    def theirs(r: Tensor, decay: Tensor, initial_state: Tensor | None = None, **given: Any) -> Any:
        turned = {"q": r, "w": -decay.exp(), **given}
        turned = {n: t if n == "u" else t.transpose(1, 2) for n, t in turned.items()}
        state = {"initial_state": initial_state, "output_final_state": True}
        out, last = naive_recurrent_rwkv6(**turned, **state)
        return out.transpose(1, 2), last

    given = mixer()
    given["r"] = given.pop("q")
    if not started:
        del given["initial_state"]
    agree(ours, theirs, decay=rand(B, L, H, K), u=rand(H, K), **given)


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("started", [True, False])
def test_hgrn(way: str, started: bool) -> None:
    function = getattr(hgrn, f"{way}_hgrn")
    given = {"x": rand(B, L, K), "g": rand(B, L, K)}
    if started:
        given["initial_state"] = rand(B, K)

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda g, **given: function(**given, g=F.logsigmoid(g), output_final_state=True)

    agree(called(function), called(naive_recurrent_hgrn), **given)


@pytest.mark.parametrize("keys", ["even", "small", "one channel"])
@pytest.mark.parametrize("name", ["chunk_gla", "chunk_simple_gla"])
def test_decays_round_as_a_loop_does(name: str, keys: str) -> None:
    """Also where most keys are small, or one channel is large: the gradient of k loses first."""
    torch.manual_seed(0)
    shape = (1, 256, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    if keys == "small":
        k[:, ::2] *= 1e-3
    if keys == "one channel":
        k[..., 0] *= 100
        q[..., 0] = 0
    decay = F.logsigmoid(torch.randn(shape[: 3 if "simple" in name else 4]).double()) / 16

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor]:
        state, out = torch.zeros((), dtype=q.dtype), []
        for t in range(q.shape[1]):
            kept = (g[:, t, :, None] if g.dim() == 3 else g[:, t]).exp()
            state = state * kept[..., None] + k[:, t, :, :, None] * v[:, t, :, None]
            out.append((q[:, t, :, :, None] * q.shape[3] ** -0.5 * state).sum(-2))
        return (torch.stack(out, 1),)

    def results(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(dtype).requires_grad_() for t in (q, k, v, decay)]
        out = function(*given)[0]
        return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]

    truth = results(loop, torch.float64)
    ours, theirs = (
        [float((t - exact).detach().abs().max()) for t, exact in zip(found, truth, strict=True)]
        for found in (results(getattr(ops, name), torch.float32), results(loop, torch.float32))
    )
    assert all(a < 4 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
