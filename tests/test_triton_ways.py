"""Triton kernels whose programs go ways of their own, all at once, against plain formulas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fuseport.exporter import api, shims
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.shims._triton import launch
from fuseport.tests.test_triton_kernels import Case, computes_its_formula, drawn

with shims.installed("triton"):  # by name: it replaces a Triton that is there
    import triton
    import triton.language as tl

Saved = Callable[..., tuple[Path, str]]


# A loss: most programs return late, some early, and read where a label says.


@triton.jit
def loss_kernel(x, labels, losses, n, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    x += row * n
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        return
    largest, total = float("-inf"), 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, at < n, other=float("-inf"))
        new = tl.maximum(largest, tl.max(values))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(values - new))
        largest = new
    tl.store(losses + row, tl.log(total) + largest - tl.load(x + label))


LABELS = torch.tensor([2, -100, 0, 10, -100])


def loss(x: Tensor, labels: Tensor) -> Tensor:
    losses = x.new_empty(len(x))
    loss_kernel[(len(x),)](x, labels, losses, x.shape[1], IGNORED=-100, BLOCK=4)
    return losses


# Names, pointers and what a function returns, of more ways than one.


@triton.jit
def bent(x, slope):
    if x > 1:
        return x * x
    if x < -1:
        return -x * slope
    return x * slope


@triton.jit
def ways_kernel(x, y, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    first = tl.load(x + row * n)
    scale = 1.0
    if first > 0:
        source, scale = x, 3.0
        if row % 2 == 0 and not first > 1:
            scale += first
        elif row == 1:
            scale = first * 0.5
        here = row * n
    else:
        source = x
        here = (tl.num_programs(0) - 1 - row) * n
    source += here
    values = tl.load(source + at, at < n, other=0.0) * (scale if row < 3 else -first)
    if row > 0:
        values += bent(first, tl.load(y + row))
    tl.store(out + row * n + at, values, at < n)


def ways(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ways_kernel[(len(x),)](x, y, out, x.shape[1], BLOCK=8)
    return out


def ways_formula(x: Tensor, y: Tensor) -> Tensor:
    out = []
    for row, first in enumerate(x[:, 0]):
        scale = torch.ones_like(first)
        source = x[row] if first > 0 else x[len(x) - 1 - row]
        if first > 0:
            scale = 3 * scale
            if row % 2 == 0 and not first > 1:
                scale = scale + first
            elif row == 1:
                scale = first * 0.5
        values = source * (scale if row < 3 else -first)
        if row > 0:
            bend = first * first if first > 1 else first * y[row] * (1 if first >= -1 else -1)
            values = values + bend
        out.append(values)
    return torch.stack(out)


# Loops of which each program has turns of its own, and a sum by atomic operations of some.


@triton.jit
def turns_kernel(x, out, total, n, BLOCK: tl.constexpr):
    """Sums of the blocks from a program's own to the last, and up to its own."""
    block, at = tl.program_id(0), tl.arange(0, BLOCK)
    after = tl.zeros([BLOCK], tl.float32)
    for start in range(block * BLOCK, n, BLOCK):
        after += tl.load(x + start + at, start + at < n, other=0.0)
    pointers, before = x + at, tl.zeros([BLOCK], tl.float32)
    for other in range(0, block + 1):
        before += tl.load(pointers, other * BLOCK + at < n, other=0.0) * (other + 1)
        pointers += BLOCK
    here = block * BLOCK + at
    tl.store(out + here, after * before, here < n)
    if block % 2 == 1:
        tl.atomic_add(total, tl.sum(before))


def turns(x: Tensor) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), x.new_zeros(1)
    turns_kernel[(triton.cdiv(len(x), 4),)](x, out, total, len(x), BLOCK=4)
    return out, total


def turns_formula(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 4)).view(-1, 4)
    after = blocks.flip(0).cumsum(0).flip(0)
    before = (blocks * torch.arange(1, len(blocks) + 1)[:, None]).cumsum(0)
    return (after * before).reshape(-1)[: len(x)], before[1::2].sum().view(1)


CASES = {
    "loss": Case(
        lambda x: loss(x, LABELS),
        lambda x: cross_entropy(x, LABELS, reduction="none"),
        ((5, 11),),
    ),
    "ways": Case(ways, ways_formula, ((6, 5), (6,))),
    "turns": Case(turns, turns_formula, ((19,),)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_its_formula_and_its_gradient_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_MOST", 1)  # programs that run one after the other
    computes_its_formula(CASES[name])


# What some programs store and others read.


@triton.jit
def in_place_kernel(x, labels, n, BLOCK: tl.constexpr):
    """Where a label says so, a row becomes a softmax without the place of the label."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    if label >= 0:
        largest = tl.load(x + row * n + label)
        values = tl.exp(tl.load(x + row * n + at, at < n, other=0.0) - largest)
        values = tl.where(at < n, values, 0.0)
        tl.store(x + row * n + at, values / tl.sum(values), at < n)


def test_what_a_program_reads_and_stores_may_be_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST", 1)
    x = drawn(5, 7)
    expected = torch.where(LABELS[:, None] >= 0, x.softmax(-1), x)
    in_place_kernel[(5,)](x, LABELS.clamp(max=6), 7, BLOCK=8)
    torch.testing.assert_close(x, expected)


@triton.jit
def neighbour_kernel(x, n, BLOCK: tl.constexpr):
    """What a program reads hangs on whether the one before was there first."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    if row > 0:
        before = tl.load(x + (row - 1) * n + at, at < n)
        tl.store(x + row * n + at, tl.load(x + row * n + at, at < n) + before, at < n)


def test_what_others_store_is_read_by_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 5)
    before = x.clone()
    neighbour_kernel[(4,)](x, 5, 8)
    torch.testing.assert_close(x, before.cumsum(0))
    monkeypatch.setattr(launch, "_MOST", 1)
    with pytest.raises(RuntimeError, match="its 4 programs go each its own way"):
        neighbour_kernel[(4,)](before, 5, 8)


# In artifacts, over a dynamic dimension.

CODE = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    here = row * n + at
    values = tl.load(x + here, at < n, other=0.0)
    if tl.sum(values) > 0:
        values = values * values
    elif row % 2 == 1:
        values = -values
    {step}
    tl.store(out + here, values, at < n)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x):
        x = self.linear(x)
        out = torch.zeros_like(x)
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=8)
        return out
"""
LOOP = (
    "for turn in range(0, row % 3):\n        values += turn * tl.load(x + here, at < n, other=0.0)"
)
BREAK = "for turn in range(3):\n        if row % 2 == 1:\n            break\n        values += 1"
OTHERS = "if row > 0:\n        values += tl.load(out + here - n, at < n, other=0.0)"


def exported(saved_with: Saved, step: str, folder: Path, inputs: str) -> tuple[Any, str]:
    checkpoint, model = saved_with(CODE.replace("{step}", step), linear=nn.Linear(5, 6))
    given = parse_inputs([inputs])
    options: Any = {"shim": "triton", "inputs": given, "format": ("onnx", "torchscript")}
    return api.export(checkpoint, folder, model=model, **options), model


def test_ways_of_a_dynamic_number_of_programs_are_exported(
    tmp_path: Path, saved_with: Saved
) -> None:
    done, model = exported(saved_with, LOOP, tmp_path / "b", "x:[batch,5]")
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime", "torchscript"])
    assert report.exit_code() == 0, report.failures()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (BREAK, "which way a kernel goes differs along axis 0 of its grid"),
        (OTHERS, "what some programs store and others read differs along axis 0 of its grid"),
    ],
    ids=["break", "others"],
)
def test_ways_that_hang_on_the_order_of_programs_want_a_fixed_number(
    step: str, reason: str, tmp_path: Path, saved_with: Saved
) -> None:
    wanted = f"{reason}.*export that dimension with a fixed size"
    with pytest.raises(FuseportError, match=wanted):
        exported(saved_with, step, tmp_path / "dynamic", "x:[batch,5]")


MEAN = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def kernel(x, labels, losses, n, count, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    if label == 0:
        tl.store(losses + row, 0.0)
        return
    x += row * n
    values = tl.load(x + at, at < n, other=float("-inf"))
    largest = tl.max(values)
    loss = tl.log(tl.sum(tl.exp(values - largest))) + largest - tl.load(x + label)
    tl.store(losses + row, loss / count)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x, labels):
        x = self.linear(x)
        losses = x.new_empty(x.shape[0])
        count = (labels != 0).sum().item()
        assert labels.max() < 6
        kernel[(x.shape[0],)](x, labels, losses, x.shape[1], count, BLOCK=8)
        return losses.sum()
"""


def test_a_number_that_code_has_of_a_tensor_is_none_that_a_kernel_points_at(
    tmp_path: Path, saved_with: Saved
) -> None:
    """A mean loss, of the labels that count."""
    checkpoint, model = saved_with(MEAN, linear=nn.Linear(5, 6))
    given = parse_inputs(["x:[batch,5],labels:int64[batch]<6"])
    options: Any = {"shim": "triton", "inputs": given, "format": ("onnx", "torchscript")}
    done = api.export(checkpoint, tmp_path / "b", model=model, **options)
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime", "torchscript"])
    assert report.exit_code() == 0, report.failures()
