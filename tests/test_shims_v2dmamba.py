"""The stand-in for 2DMamba's extension, against its recurrence along rows and columns."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import v2dmamba_scan


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def scan_inputs(height: int, width: int) -> list[Tensor]:
    b, d, groups, states, length = 2, 4, 2, 3, height * width
    return [
        rand(b, d, length),
        0.1 * rand(b, d, length),
        -torch.rand(d, states, dtype=torch.float64),
        rand(b, groups, states, length),
        rand(b, groups, states, length),
        rand(d),
        rand(b, d, length),
        rand(d),
    ]


def by_definition(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    bias: Tensor,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Place by place: the outputs, the states of rows and of both, and the decays."""
    height, width = size
    step = F.softplus(delta + bias[:, None], threshold=20.0)
    B, C = (t.repeat_interleave(u.shape[1] // t.shape[1], 1) for t in (B, C))
    decay = torch.exp(step[:, :, None] * A[:, :, None]).unflatten(3, size)
    given = ((step * u)[:, :, None] * B).unflatten(3, size)
    rows: dict[tuple[int, int], Tensor] = {}
    both: dict[tuple[int, int], Tensor] = {}
    nothing = torch.zeros_like(given[..., 0, 0])
    for y in range(height):
        for x in range(width):
            before, above = rows.get((y, x - 1), nothing), both.get((y - 1, x), nothing)
            rows[y, x] = given[..., y, x] + decay[..., y, x] * before
            both[y, x] = rows[y, x] + decay[..., y, x] * above
    of_rows, of_both = (torch.stack(list(each.values()), -1) for each in (rows, both))
    out = (of_both * C).sum(2) + D[:, None] * u
    out = out if z is None else out * F.silu(z)
    return out, of_rows.unflatten(3, size), of_both.unflatten(3, size), decay


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 1), (3, 4), (2, 35)])
@pytest.mark.parametrize("gated", [False, True])
def test_values_and_gradients(size: tuple[int, int], gated: bool) -> None:
    inputs: list[Tensor | None] = [*scan_inputs(*size)]
    inputs[6] = inputs[6] if gated else None
    leaves: list[Any] = [None if t is None else t.requires_grad_() for t in inputs]
    expected = by_definition(*leaves, size)[0]
    out, x, *rest = v2dmamba_scan.fwd(*leaves, True, *size)
    (last,) = rest or (out,)
    torch.testing.assert_close(last, expected)
    cotangent = rand(*expected.shape)
    given = [leaf for leaf in leaves if leaf is not None]
    right = torch.autograd.grad(expected, given, cotangent)
    for one, other in zip(torch.autograd.grad(last, given, cotangent), right, strict=True):
        torch.testing.assert_close(one, other)
    kept = out if gated else None
    found = v2dmamba_scan.bwd(*leaves, cotangent, x, kept, None, True, gated, *size)
    if gated:
        torch.testing.assert_close(found.pop(), expected.detach())
        found.insert(6, found.pop())
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [(3, 4), (33, 2), (2, 65), (64, 32)])
def test_states_are_those_after_the_rows_and_columns_of_squares(size: tuple[int, int]) -> None:
    inputs: list[Any] = scan_inputs(*size)
    _, rows, both, decay = by_definition(*inputs, size)
    x = v2dmamba_scan.fwd(*inputs, True, *size)[1]
    down, across = (-(-n // 32) for n in size)
    assert x.shape == (2, 4, down, across, 3, 2, 32, 2)
    ways = [(rows, decay, x[..., 0, :, :]), (both.mT, decay.mT, x[..., 1, :, :].transpose(2, 3))]
    for states, factors, saved in ways:
        lines, length = states.shape[3:]
        for square in range(saved.shape[3]):
            end = min(32 * square + 32, length) - 1
            product = factors[..., : end + 1].prod(4)
            found = saved[:, :, :, square].transpose(2, 3).flatten(3, 4)
            torch.testing.assert_close(found[:, :, :, :lines, 0], product)
            torch.testing.assert_close(found[:, :, :, :lines, 1], states[..., end])
            beside = found[:, :, :, lines:]
            assert torch.equal(beside, torch.tensor([1.0, 0.0]).double().expand_as(beside))


def test_half_types_and_what_is_written() -> None:
    wide: list[Any] = scan_inputs(3, 4)
    exact = by_definition(*wide, (3, 4))[0]
    half: list[Any] = [t.half() if t.dim() > 2 else t.float() for t in wide]
    outs = {w: v2dmamba_scan.fwd(*half, True, 3, 4, w) for w in (True, False)}
    assert [t.dtype for t in outs[True]] == [torch.float32] * 3
    assert [t.dtype for t in outs[False]] == [torch.float16, torch.float32, torch.float16]
    torch.testing.assert_close(outs[True][2].double(), exact, rtol=0.02, atol=0.02)
    dz = torch.empty_like(half[6])
    found = v2dmamba_scan.bwd(*half, outs[True][2], None, None, dz, True, False, 3, 4)
    assert found[7] is dz
    assert [t.dtype for t in found] == [t.dtype for t in (*half[:6], half[7], half[6])]


def test_what_there_is_no_kernel_of_is_refused() -> None:
    inputs: list[Any] = scan_inputs(3, 4)
    with pytest.raises(ValueError, match="3 × 5 is not the length 12 of u"):
        v2dmamba_scan.fwd(*inputs, True, 3, 5)
    inputs[3] = inputs[3][:, 0]
    with pytest.raises(ValueError, match=r"B, C of \(b, G, N, l\)"):
        v2dmamba_scan.fwd(*inputs, True, 3, 4)


@pytest.fixture
def cleared() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in ("v2dmamba_scan", "their_models"):
            del sys.modules[name]


@pytest.mark.usefixtures("cleared")
def test_it_is_found_in_the_packages_that_it_is_compiled_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("v2dmamba_scan", "their_models/pscan_cuda", "their_models/v2dmamba_scan"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("from .pscan import *\n")
    (tmp_path / "their_models" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    packages = ("v2dmamba_scan", "their_models.pscan_cuda", "their_models.v2dmamba_scan")
    with shims.installed() as used:
        for name in packages:
            package: Any = importlib.import_module(name)
            assert package.__file__ == str(tmp_path / name.replace(".", "/") / "__init__.py")
            assert package.fwd.__module__ == package.bwd.__module__
        with pytest.raises(ModuleNotFoundError, match="pscan"):
            importlib.import_module("their_models.pscan")  # a name that others have, too
    assert used == ["v2dmamba_scan.pscan", "pscan_cuda.pscan"]


CODE = """
import torch
import v2dmamba_scan
from torch import nn


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, bias, height, width):
        out, x = v2dmamba_scan.fwd(u, delta, A, B, C, D, None, bias, True, height, width)
        ctx.size = height, width
        ctx.save_for_backward(u, delta, A, B, C, D, bias, x)
        return out

    @staticmethod
    def backward(ctx, dout):
        *inputs, bias, x = ctx.saved_tensors
        found = v2dmamba_scan.bwd(
            *inputs, None, bias, dout.contiguous(), x, None, None, True, False, *ctx.size
        )
        return *found, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.given = nn.Conv2d(3, 4, 1)
        self.step = nn.Conv2d(3, 4, 1)
        self.states = nn.Conv2d(3, 8, 1)
        self.A_log = nn.Parameter(torch.rand(4, 2))
        self.D = nn.Parameter(torch.ones(4))

    def forward(self, x):
        height, width = x.shape[2:]
        u, delta = self.given(x).flatten(2), self.step(x).flatten(2)
        B, C = self.states(x).flatten(2).unflatten(1, (2, 2, 2)).unbind(1)
        y = Scan.apply(
            u, delta, -self.A_log.exp(), B, C, self.D, self.step.bias, height, width
        )
        return y.unflatten(2, (height, width))
"""


def test_a_model_of_it_is_exported_for_images_of_any_size(
    tmp_path: Path, saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]]
) -> None:
    with shims.installed():
        _, checkpoint, model = saved_net(CODE)
    _, report = verified(
        tmp_path / "b", (checkpoint, model), ["x:[batch,3,height,width]"], ["v2dmamba_scan"]
    )
    rows = [row for row in report.results if row.verdict == "pass"]
    assert {"run", "own backward"} <= {row.way for row in rows}
