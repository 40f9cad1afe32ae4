"""The mixers of RWKV in torch, against loops that go as their CUDA kernels do."""

from collections.abc import Callable, Mapping
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter.shims._cuda_sources.wkv import FAMILIES, Form

BATCH, CHANNELS, HEADS = 2, 6, 2
FORMS = {form.what: (family, form) for family in FAMILIES for form in family.forms}
LENGTHS = (1, 2, 7, 40, 70)


def averaged(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RWKV-4: running sums, divided by exp of the running maximum of their exponents."""
    sums = weights = torch.zeros_like(k[:, 0])
    top = torch.full_like(sums, -1e38)
    out = []
    for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
        most = torch.maximum(top, u + key)
        before, own = (top - most).exp(), (u + key - most).exp()
        out.append((before * sums + own * value) / (before * weights + own))
        most = torch.maximum(w + top, key)
        before, own = (w + top - most).exp(), (key - most).exp()
        sums, weights, top = before * sums + own * value, before * weights + own, most
    return torch.stack(out, 1)


def both_ways(w: Tensor, u: Tensor, k: Tensor, v: Tensor, parts: int) -> Tensor:
    """Vision-RWKV: of each part what is before it and what is from it on, then step by step."""
    length = k.shape[1]
    size = (length + parts - 1) // parts
    weight = torch.stack([k.exp() * v, k.exp()])
    out = []
    for first in range(0, length, size):
        before = sum(
            (weight[:, :, s] * (-w * (first - s)).exp() for s in range(first)),
            start=torch.zeros_like(weight[:, :, 0]),
        )
        after = sum(
            (weight[:, :, s] * (-w * (s - first)).exp() for s in range(first + 1, length)),
            start=torch.zeros_like(weight[:, :, 0]),
        )
        for t in range(first, min(first + size, length)):
            own = weight[:, :, t] * u.exp()
            out.append((before + after + own)[0] / (before + after + own)[1])
            before = before * (-w).exp() + weight[:, :, t]
            after = (after - weight[:, :, (t + 1) % length]) * w.exp()
    return torch.stack(out, 1)


def heads(x: Tensor) -> Tensor:
    """(…, C) as (…, H, N)."""
    return x.unflatten(-1, (HEADS, -1))


def mixed(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, u: Tensor, state: Tensor | None = None
) -> Tensor:
    """RWKV-5 and 6, with states of values by keys."""
    r, k, v, u = map(heads, (r, k, v, u))
    decay = heads(decay).expand_as(k)
    sums = torch.zeros_like(k[:, 0]).unsqueeze(-1) * k[:, 0].unsqueeze(-2)
    sums = sums if state is None else state
    out = []
    for t in range(r.shape[1]):
        added = v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        out.append(((u * added.transpose(1, 2)).transpose(1, 2) + sums) @ r[:, t].unsqueeze(-1))
        sums = sums * decay[:, t].unsqueeze(-2) + added
    return torch.stack(out, 1).flatten(2)


def corrected(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """RWKV-7, likewise."""
    q, k, v, a, b, decay = (x if x.dim() == 4 else heads(x) for x in (q, k, v, a, b, decay))
    sums = torch.zeros_like(k[:, 0]).unsqueeze(-1) * k[:, 0].unsqueeze(-2)
    out = []
    for t in range(q.shape[1]):
        read = sums @ a[:, t].unsqueeze(-1)
        sums = sums * decay[:, t].unsqueeze(-2) + read * b[:, t].unsqueeze(-2)
        sums = sums + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        out.append((sums @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1).flatten(2)


def slow(form: Form, x: Mapping[str, Any]) -> Tensor:
    """What a form should compute."""
    if "RWKV-4" in form.what:
        return averaged(x["w"], x["u"], x["k"], x["v"])
    if "Vision" in form.what:
        return both_ways(x["w"], x["u"], x["k"], x["v"], 64 if "64" in form.what else 32)
    decays: dict[str, Callable[[Tensor], Tensor]] = {
        "exp(-exp(w))": lambda w: (-w.exp()).exp(),
        "exp(w)": torch.exp,
        "w": lambda w: w,
        "exp(-exp(-0.5)·sigmoid(w))": lambda w: (-exp(-0.5) * w.sigmoid()).exp(),
    }
    decay = decays[form.what.split("decays ")[1].removesuffix(", both ways")](x["w"])
    if "RWKV-7" in form.what:
        q, a, b = ("q", "z", "a") if "q" in x else ("r", "a", "b")
        return corrected(x[q], x["k"], x["v"], x[a], x[b], decay)
    found = mixed(x["r"], x["k"], x["v"], decay, x["u"], x.get("s"))
    if form.what.endswith("both ways"):
        turned = (t.flip(1) for t in (x["r"], x["k"], x["v"], decay))
        found = found + mixed(*turned, torch.zeros_like(x["u"])).flip(1)
    return found


def drawn(shapes: Mapping[str, str], form: Form, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments by their names."""
    sizes = {"B": BATCH, "T": length, "C": CHANNELS, "H": HEADS, "N": CHANNELS // HEADS}
    draw = torch.Generator().manual_seed(length)
    given: dict[str, Any] = dict(sizes)
    for name, shape in shapes.items():
        uniform = torch.rand([sizes[s] for s in shape], generator=draw, dtype=torch.float64)
        given[name] = form.draw(name, uniform).to(dtype)
    return given


CASES = [
    pytest.param(family, form, id=f"{form.what}, {''.join(family.parameters)}")
    for family in FAMILIES
    for form in family.forms
]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_values_and_gradients_are_those_of_loops(family: Any, form: Form) -> None:
    shapes = {**family.shapes, **form.shapes}
    for length in LENGTHS:
        given = drawn(shapes, form, length, torch.float64)
        leaves = {name: given[name].requires_grad_() for name in shapes}
        expected = slow(form, given)
        out = form.compute(given)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        cotangent = torch.randn(out.shape, dtype=out.dtype)
        found, wanted = (
            torch.autograd.grad(y, [*leaves.values()], cotangent, materialize_grads=True)
            for y in (out, expected)
        )
        for name, ours, theirs in zip(leaves, found, wanted, strict=True):
            said = f"{name} at {length}"
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8, msg=said)
            if length > 2:  # after two steps there is nothing yet that has decayed
                assert theirs.abs().sum() > 0, said
        narrow = form.compute({n: x.float() if n in leaves else x for n, x in given.items()})
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [-30.0, -1e-4, -3.0, 0.0])
@pytest.mark.parametrize("spread", [300.0, 1.0])
def test_averages_bear_keys_far_apart_and_long_sequences(decay: float, spread: float) -> None:
    """As the running maximum does: sums of exp(k) alone would be infinite, or nothing."""
    form = FORMS["RWKV-4's WKV"][1]
    draw = torch.Generator().manual_seed(3)
    k, v = (torch.randn((1, 1500, 3), generator=draw) for _ in range(2))
    k = k.clamp(-1, 1) * spread
    w, u = torch.full((3,), decay), torch.tensor([-90.0, 0.0, 90.0])
    given = {"w": w, "u": u, "k": k, "v": v}
    leaves = [t.requires_grad_() for t in given.values()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, expected = form.compute(given), averaged(*wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn(out.shape, generator=draw)
    found = torch.autograd.grad(out, leaves, cotangent)
    wanted = torch.autograd.grad(expected, wide, cotangent.double())
    for ours, theirs in zip(found, wanted, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("decay", [0.5, -0.2])
def test_ways_both_bear_decays_that_leave_nothing_and_growth(decay: float) -> None:
    form = FORMS["Vision-RWKV's WKV in 32 parts"][1]
    draw = torch.Generator().manual_seed(4)
    k, v = (torch.randn((1, 200, 3), generator=draw, dtype=torch.float64) for _ in range(2))
    given = {"w": torch.full((3,), decay).double(), "u": k[0, 0], "k": k, "v": v}
    expected = both_ways(*given.values(), 32)
    torch.testing.assert_close(form.compute(given), expected, rtol=1e-9, atol=1e-9)


def test_decays_that_leave_nothing_are_borne() -> None:
    """Those of RWKV-5 come as exp(-exp(w)), which is 0 for w from 5 on."""
    form = FORMS["RWKV-5's WKV with decays w"][1]
    given = drawn({**FORMS[form.what][0].shapes, **form.shapes}, form, 9, torch.float64)
    leaf = torch.full((CHANNELS,), 12.0, dtype=torch.float32, requires_grad=True)
    tensors = {n: t.float() for n, t in given.items() if isinstance(t, Tensor)}
    w = (-leaf.exp()).exp()
    out = form.compute({**given, **tensors, "w": w})
    expected = slow(form, {**given, "w": torch.zeros(CHANNELS, dtype=torch.float64)})
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(out.sum(), leaf)
    assert slope.abs().max() == 0
