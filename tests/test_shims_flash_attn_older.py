"""The stand-ins for extensions of older flash-attention, against their sums in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import dropout_layer_norm
    import rotary_emb
    import xentropy_cuda_lib

ROWS, WIDTH, EPSILON = 5, 8, 1e-3


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, rms: bool) -> Tensor:
    centred = x if rms else x - x.mean(1, keepdim=True)
    y = weight * centred / (centred.square().mean(1, keepdim=True) + EPSILON).sqrt()
    return y if bias is None else y + bias


def dropped(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
    return x if mask is None else x * mask / (1 - p)


def same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize(
    "given", ["", "residual", "residual beta rowscale colscale", "beta rowscale", "colscale"]
)
def test_a_norm_of_a_sum(given: str, prenorm: bool, p: float, rms: bool) -> None:
    torch.manual_seed(0)
    x0, gamma = rand(ROWS, WIDTH), rand(WIDTH)
    sizes = {"residual": (ROWS, WIDTH), "beta": (WIDTH,), "rowscale": (ROWS,), "colscale": (WIDTH,)}
    there = {name: rand(*size) for name, size in sizes.items() if name in given.split()}
    residual, beta, rowscale, colscale = (there.get(name) for name in sizes)
    arguments = (x0, residual, gamma, beta, rowscale, colscale, None, None)
    z, x, mask, mean, reciprocal = dropout_layer_norm.dropout_add_ln_fwd(
        *arguments, p, EPSILON, 1.0, 0, None, False, rms
    )
    assert (mask is None) == (p == 0)
    total = dropped(x0 if rowscale is None else x0 * rowscale[:, None], mask, p)
    total = total if colscale is None else total * colscale
    total = total if residual is None else total + residual
    expected = norm(total, gamma, beta, rms)
    torch.testing.assert_close(z, expected)
    if p == 0 and set(given.split()) <= {"beta"}:
        assert x is None
        x = x0
    torch.testing.assert_close(x, total)
    torch.testing.assert_close(mean, total.mean(1))

    leaves = [x0, gamma, *there.values()]
    dz, dx = torch.randn_like(z), torch.randn_like(x)
    outs, cotangents = ((expected, total), (dz, dx)) if prenorm else ((expected,), (dz,))
    right = torch.autograd.grad(outs, leaves, cotangents)
    mine = (z, x) if prenorm else (z,)
    same(torch.autograd.grad(mine, leaves, cotangents, retain_graph=True), right)
    found = dropout_layer_norm.dropout_add_ln_bwd(
        *(dz, dx if prenorm else None, x, x0, mask, mean, reciprocal, gamma, rowscale, colscale),
        *(None, None, p, 1.0, 0, residual is not None, rms),
    )
    names = ["x0", "residual", "gamma", "beta", "", "", "colscale", ""]
    by_name = dict(zip(names, found, strict=False))
    wanted = dict(zip(["x0", "gamma", *there], right, strict=True))
    wanted.pop("rowscale", None)  # the extension gives it none
    same([by_name[name] for name in wanted], list(wanted.values()))
    assert (by_name["residual"] is None) == (residual is None)
    assert len(found) == (8 if colscale is not None else 6)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("given", ["", "x1", "x1 residual gamma1", "residual gamma1 beta0 beta1"])
def test_two_norms_of_a_sum(given: str, p: float, rms: bool) -> None:
    torch.manual_seed(0)
    x0, gamma0 = rand(ROWS, WIDTH), rand(WIDTH)
    names = ("x1", "residual", "beta0", "gamma1", "beta1")
    there = {
        name: rand(ROWS, WIDTH) if name in ("x1", "residual") else rand(WIDTH)
        for name in names
        if name in given.split()
    }
    x1, residual, beta0, gamma1, beta1 = (there.get(name) for name in names)
    arguments = (x0, x1, residual, gamma0, beta0, gamma1, beta1, p, EPSILON, None, False, rms)
    z0, z1, x, *masks, mean, reciprocal = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(
        *arguments
    )
    total = dropped(x0, masks[0], p)
    total = total if x1 is None else total + dropped(x1, masks[1], p)
    total = total if residual is None else total + residual
    expected = [norm(total, gamma0, beta0, rms)]
    if gamma1 is not None:
        expected.append(norm(total, gamma1, beta1, rms))
    outs = [z0] if z1 is None else [z0, z1]
    same(outs, expected)
    x = x0 if x is None else x
    torch.testing.assert_close(x, total)

    cotangents = [torch.randn_like(z) for z in outs]
    dx = torch.randn_like(x)
    leaves = [x0, gamma0, *there.values()]
    right = torch.autograd.grad([*expected, total], leaves, [*cotangents, dx])
    mine = torch.autograd.grad([*outs, x], leaves, [*cotangents, dx], retain_graph=True)
    same(mine, right)
    dz1 = cotangents[1] if gamma1 is not None else None
    found = dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(
        *(cotangents[0], dz1, dx, x, *masks, mean, reciprocal, gamma0, gamma1),
        *(p, x1 is not None, residual is not None, rms),
    )
    order = ("x0", "x1", "residual", "gamma0", "beta0", "gamma1", "beta1")
    by_name = dict(zip(order, found, strict=False))
    wanted = dict(zip(["x0", "gamma0", *there], right, strict=True))
    same([by_name[name] for name in wanted], list(wanted.values()))
    assert len(found) == 11


def test_half_types_and_sums_in_float32() -> None:
    x0 = torch.randn(ROWS, WIDTH).half()
    gamma = torch.ones(WIDTH).half()
    rest = (None, None, None, None, 0.0, EPSILON, 1.0, 0, None)
    forward = dropout_layer_norm.dropout_add_ln_fwd
    z, x, _, mean, _ = forward(x0, None, gamma, None, *rest, True, True)
    assert [t.dtype for t in (z, x, mean)] == [torch.float16, torch.float32, torch.float32]
    assert forward(x0, None, gamma, None, *rest, False, True)[1] is None
    some = torch.ones(ROWS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="leaves out none"):
        forward(x0, None, gamma, None, None, None, some, some, *rest[4:])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropies(smoothing: float) -> None:
    logits, labels = rand(ROWS, WIDTH), torch.tensor([0, 7, 3, 3, 5])
    losses, lse = xentropy_cuda_lib.forward(logits, labels, smoothing)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    same((losses, lse), (expected, logits.logsumexp(1)))
    dloss = torch.randn_like(losses)
    (right,) = torch.autograd.grad(expected, logits, dloss, retain_graph=True)
    same(torch.autograd.grad(losses, logits, dloss), (right,))
    given = logits.detach().clone()
    for inplace in (False, True):
        found = xentropy_cuda_lib.backward(dloss, given, lse.detach(), labels, smoothing, inplace)
        torch.testing.assert_close(found, right)
        assert (found is given) == inplace


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropies_of_classes_that_processes_share(smoothing: float) -> None:
    logits, labels = rand(ROWS, WIDTH), torch.tensor([0, 7, 3, 4, 5])
    halves = logits.chunk(2, 1)
    parts = [
        xentropy_cuda_lib.forward(half, labels - 4 * rank, smoothing, WIDTH)
        for rank, half in enumerate(halves)
    ]
    own = [(labels >= 4 * rank) & (labels < 4 * rank + 4) for rank in range(2)]
    lse = torch.stack([its for _, its in parts]).logsumexp(0)
    # What a process takes for the log-sum-exp is that of its half.
    of_halves = [
        losses + (1 - smoothing) * mine * (lse - its) - smoothing * its
        for (losses, its), mine in zip(parts, own, strict=True)
    ]
    one_sum = of_halves[0] + of_halves[1] + smoothing * lse
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    same([one_sum], [expected])
    dloss = torch.randn_like(lse)
    found = [
        xentropy_cuda_lib.backward(dloss, half, lse, labels - 4 * rank, smoothing, False, WIDTH)
        for rank, half in enumerate(halves)
    ]
    (right,) = torch.autograd.grad(expected, logits, dloss)
    same([torch.cat(found, 1)], [right])


class Turned(torch.autograd.Function):
    """As flash-attention's own, which says to torch nothing of what it writes in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, -1)
        rotary_emb.apply_rotary(first, second, cos, sin, first, second, False)
        return x

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dx,) = cotangents
        first, second = dx.chunk(2, -1)
        rotary_emb.apply_rotary(first, second, *ctx.saved_tensors, first, second, True)
        return dx, None, None


def test_a_part_of_a_projection_is_turned_in_place() -> None:
    projected, angles = rand(3, 12), torch.rand(3, 2).double()
    queries, values = (projected * 1).split((4, 8), 1)
    out = Turned.apply(queries, angles.cos(), angles.sin())
    found = torch.cat([out, values.mT.mT], 1)  # views of what was written to
    first, second = projected[:, :2], projected[:, 2:4]
    turned = [
        first * angles.cos() - second * angles.sin(),
        first * angles.sin() + second * angles.cos(),
    ]
    expected = torch.cat([*turned, projected[:, 4:]], 1)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(found)
    right = torch.autograd.grad(expected, projected, cotangent)
    same(torch.autograd.grad(found, projected, cotangent), right)


CODE = """
import dropout_layer_norm
import torch
import xentropy_cuda_lib
from torch import nn


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x0, residual, gamma):
        rows = (x0.view(-1, x0.shape[-1]), residual.view(-1, x0.shape[-1]))
        z, x, _, mean, reciprocal = dropout_layer_norm.dropout_add_ln_fwd(
            *rows, gamma, *[None] * 5, 0.0, 1e-5, 1.0, 0, None, False, True
        )
        ctx.save_for_backward(x, gamma, mean, reciprocal)
        return z.view(x0.shape), x.view(x0.shape)

    @staticmethod
    def backward(ctx, dz, dx):
        x, gamma, mean, reciprocal = ctx.saved_tensors
        dx0, dresidual, dgamma, *_ = dropout_layer_norm.dropout_add_ln_bwd(
            dz.reshape(x.shape), dx.reshape(x.shape), x, None, None, mean, reciprocal, gamma,
            *[None] * 4, 0.0, 1.0, 0, True, True,
        )
        return dx0.view(dz.shape), dresidual.view(dz.shape), dgamma


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        losses, lse = xentropy_cuda_lib.forward(logits, labels, 0.1)
        losses.masked_fill_(labels == 2, 0)
        ctx.save_for_backward(logits, lse, labels)
        return losses

    @staticmethod
    def backward(ctx, dloss):
        logits, lse, labels = ctx.saved_tensors
        dloss = dloss.contiguous().masked_fill(labels == 2, 0)
        return xentropy_cuda_lib.backward(dloss, logits, lse, labels, 0.1, False), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x, labels):
        z, x = Norm.apply(self.inner(x), x, self.weight)
        logits = (z + x).flatten(0, 1)
        return Loss.apply(logits, labels.flatten()).view(labels.shape)
"""


def test_a_model_of_both_is_exported(
    tmp_path: Path, saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]]
) -> None:
    with shims.installed():
        _, checkpoint, model = saved_net(CODE)
    _, report = verified(
        tmp_path / "b",
        (checkpoint, model),
        ["x:[batch,length,8]", "labels:int64[batch,length]<8"],
        ["dropout_layer_norm", "xentropy_cuda_lib"],
    )
    rows = [row for row in report.results if row.verdict == "pass"]
    assert {"run", "own backward"} <= {row.way for row in rows}
