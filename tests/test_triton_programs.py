"""Triton kernels whose programs scan, reduce, give blocks other shapes and go their own ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.exporter.shims._triton.memory import Memory
from fuseport.tests.test_triton_kernels import (
    Case,
    computes_its_formula,
    is_the_same_gathered,
)

with shims.installed("triton"):  # by name: it replaces a Triton that is there
    import triton
    import triton.language as tl


# Scans and reductions by functions of the code's own.


@triton.jit
def step(a, b, later_a, later_b):
    return a * later_a, b * later_a + later_b


@triton.jit
def recurrence_kernel(a, b, out, backwards, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n
    x, y = tl.load(a + at, mask, other=1.0), tl.load(b + at, mask, other=0.0)
    _, forward = tl.associative_scan((x, y), 0, step)
    _, reverse = tl.associative_scan((x, y), axis=0, combine_fn=step, reverse=True)
    tl.store(out + at, forward, mask)
    tl.store(backwards + at, reverse, mask)


def recurrence(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    out, backwards = torch.empty_like(a), torch.empty_like(a)
    recurrence_kernel[(len(a),)](a, b, out, backwards, a.shape[1], 8)
    return out, backwards


def recurrence_formula(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    def one_way(a: Tensor, b: Tensor) -> Tensor:
        states = [b[:, 0]]
        for t in range(1, a.shape[1]):
            states.append(states[-1] * a[:, t] + b[:, t])
        return torch.stack(states, 1)

    return one_way(a, b), one_way(a.flip(1), b.flip(1)).flip(1)


@triton.jit
def with_more(x, scale, y, other):
    largest = tl.maximum(x, y)
    return largest, scale * tl.exp(x - largest) + other * tl.exp(y - largest)


@triton.jit
def reduced_kernel(x, sums, running, places, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + at, at < n, other=-1e30)
    largest, scale = tl.reduce((values, tl.where(at < n, 1.0, 0.0)), 0, with_more)
    tl.store(sums + row, largest + tl.log(scale))
    kept = tl.where(at < n, values, 0)
    tl.store(running + row * n + at, tl.cumsum(kept, 0, reverse=True), at < n)
    tl.store(places + 2 * row, tl.argmax(tl.where(kept > 0, 1, 0), 0))
    found, place = tl.min(values, axis=0, return_indices=True)
    tl.store(places + 2 * row + 1, tl.where(found < -1e29, -1, place))


def reduced(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, n = x.shape
    sums, places = x.new_empty(rows), torch.empty(rows, 2, dtype=torch.int32)
    running = torch.empty_like(x)
    reduced_kernel[(rows,)](x, sums, running, places, n, n)
    return sums, running, places


def reduced_formula(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.stack([(x > 0).int().argmax(1), x.argmin(1)], 1).int()  # the first of equals
    return x.logsumexp(1), x.flip(1).cumsum(1).flip(1), places


# Blocks of other shapes.


@triton.jit
def pairs_kernel(x, cosines, sines, out, n, HALF: tl.constexpr):
    row = tl.program_id(0)
    at, half = tl.arange(0, 2 * HALF), tl.arange(0, HALF)
    values = tl.load(x + row * n + at)
    even, odd = tl.split(tl.reshape(values, (HALF, 2)))
    c, s = tl.load(cosines + row * HALF + half), tl.load(sines + row * HALF + half)
    tl.store(out + row * n + at, tl.interleave(even * c - odd * s, odd * c + even * s))


def pairs(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    out = torch.empty_like(x)
    pairs_kernel[(len(x),)](x, cosines, sines, out, x.shape[1], HALF=x.shape[1] // 2)
    return out


def pairs_formula(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(1, (-1, 2))) * torch.complex(cosines, sines)
    return torch.view_as_real(turned).flatten(1)


@triton.jit
def shapes_kernel(x, out, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    batch = tl.program_id(0) * A * B * C
    i = tl.arange(0, A)[:, None, None] * (B * C)
    at = i + tl.arange(0, B)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    block = tl.load(x + batch + at)
    moved = tl.permute(block, (2, 0, 1))
    first = tl.sum(moved, axis=1, keep_dims=True)
    wide = tl.broadcast_to(first, (C, A, B)) + tl.flip(moved, 2)
    sorted_ = tl.sort(wide)
    to = tl.arange(0, C)[:, None, None] * (A * B) + tl.expand_dims(tl.arange(0, A * B), 0).reshape(
        1, A, B
    )
    tl.store(out + batch + to, sorted_ + tl.trans(tl.trans(wide, 0, 2, 1), (0, 2, 1)))


def shapes(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[3], *x.shape[1:3])
    shapes_kernel[(len(x),)](x, out, *x.shape[1:])
    return out


def shapes_formula(x: Tensor) -> Tensor:
    moved = x.permute(0, 3, 1, 2)
    wide = moved.sum(2, keepdim=True) + moved.flip(3)
    return wide.sort(3).values + wide


# Programs that go their own ways.


@triton.jit
def chosen_kernel(x, flags, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.load(flags + row) == 0:
        return
    if row == 1:
        tl.store(out + row * n + at, at.to(tl.float32), at < n)
    else:
        tl.store(out + row * n + at, tl.load(x + row * n + at, at < n) * row, at < n)


def chosen(x: Tensor, flags: Tensor) -> Tensor:
    out = torch.full_like(x, 7)
    chosen_kernel[(len(x),)](x, flags, out, x.shape[1], 8)
    return out


def chosen_formula(x: Tensor, flags: Tensor) -> Tensor:
    rows = torch.arange(len(x), dtype=x.dtype)[:, None]
    places = torch.arange(x.shape[1], dtype=x.dtype)
    moved = torch.where(rows == 1, places, x * rows)
    return torch.where(flags[:, None] != 0, moved, 7)


@triton.jit
def packed_kernel(x, starts, out, BLOCK: tl.constexpr):
    """The sum of squares of each of packed sequences, and of the first three by another loop."""
    which = tl.program_id(0)
    begin, end = tl.load(starts + which), tl.load(starts + which + 1)
    total = 0.0
    for at in range(begin, end, BLOCK):
        places = at + tl.arange(0, BLOCK)
        values = tl.load(x + places, places < end, other=0.0)
        total += tl.sum(values * values)
    tl.store(out + 2 * which, total)
    at, total = begin, tl.zeros((), dtype=tl.float32)
    while (at < end) & (at < begin + 3):
        value = tl.load(x + at)
        total += value * value
        at += 1
    tl.store(out + 2 * which + 1, total)


def packed(x: Tensor, starts: Tensor) -> Tensor:
    out = x.new_empty(len(starts) - 1, 2)
    packed_kernel[(len(out),)](x, starts, out, BLOCK=4)
    return out


def packed_formula(x: Tensor, starts: Tensor) -> Tensor:
    lengths = starts.diff().tolist()
    parts = (x**2).split(lengths)
    return torch.stack([torch.stack([part.sum(), part[:3].sum()]) for part in parts])


@triton.jit
def tiles_kernel(x, out, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program has a loop over its rows, of which there are as many in all."""
    first, at = tl.program_id(0) * ROWS, tl.arange(0, BLOCK)
    for row in range(min(rows - first, ROWS)):
        here = (first + row) * n + at
        tl.store(out + here, tl.load(x + here, at < n) * (row + 1), at < n)


def tiles(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tiles_kernel[(triton.cdiv(len(x), 2),)](x, out, *x.shape, ROWS=2, BLOCK=8)
    return out


def tiles_formula(x: Tensor) -> Tensor:
    return x * (torch.arange(len(x), dtype=x.dtype)[:, None] % 2 + 1)


@triton.jit
def causal_kernel(q, k, v, out, n, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Attention to what is before, in blocks, with running sums."""
    block, head = tl.program_id(0), tl.program_id(1)
    rows, cols = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    at = head * n * WIDTH + rows[:, None] * WIDTH + cols[None, :]
    queries = tl.load(q + at, mask=rows[:, None] < n, other=0.0)
    largest = tl.full([BLOCK], -1e30, dtype=tl.float32)
    sums, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        there = start + tl.arange(0, BLOCK)
        of = head * n * WIDTH + there[:, None] * WIDTH + cols[None, :]
        keys = tl.load(k + of, mask=there[:, None] < n, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where((there[None, :] <= rows[:, None]) & (there[None, :] < n), scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        old = tl.exp(largest - new)
        sums = sums * old + tl.sum(weights, 1)
        values = tl.load(v + of, mask=there[:, None] < n, other=0.0)
        total = total * old[:, None] + tl.dot(weights, values)
        largest = new
    tl.store(out + at, total / sums[:, None], mask=rows[:, None] < n)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, (heads, n, width) = torch.empty_like(q), q.shape
    causal_kernel[(triton.cdiv(n, 16), heads)](q, k, v, out, n, width**-0.5, width, BLOCK=16)
    return out


def causal_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


FLAGS = torch.tensor([1, 1, 0, 1, 0], dtype=torch.int32)
STARTS = torch.tensor([0, 5, 5, 6, 15], dtype=torch.int32)
CASES = {
    "recurrence": Case(recurrence, recurrence_formula, ((3, 6), (3, 6))),
    "reductions": Case(reduced, reduced_formula, ((3, 8),)),
    "pairs": Case(pairs, pairs_formula, ((3, 8), (3, 4), (3, 4))),
    "shapes": Case(shapes, shapes_formula, ((3, 2, 4, 8),)),
    "own ways": Case(lambda x: chosen(x, FLAGS), lambda x: chosen_formula(x, FLAGS), ((5, 6),)),
    "tiles": Case(tiles, tiles_formula, ((6, 5),)),
    "uneven tiles": Case(tiles, tiles_formula, ((7, 5),)),
    "packed": Case(lambda x: packed(x, STARTS), lambda x: packed_formula(x, STARTS), ((15,),)),
    "causal": Case(causal, causal_formula, ((2, 37, 8), (2, 37, 8), (2, 37, 8))),
}


def test_loops_of_as_many_rows_in_all_programs_are_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[tuple[int, ...]] = []
    store = Memory.store

    def counted(memory: Memory, at: Any, value: Any, mask: Any) -> None:
        stored.append(tuple(value.sizes))
        store(memory, at, value, mask)

    monkeypatch.setattr(Memory, "store", counted)
    tiles(torch.randn(6, 5))
    assert stored == [(3, 8)] * 2


GATHERED = {
    "shapes": "places are given another shape",
    "packed": "the starts say where",
    "uneven tiles": "the last program has a row less",
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_its_formula_and_its_gradient(name: str) -> None:
    computes_its_formula(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_views_of_memory_are_what_gathering_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_the_same_gathered(CASES[name], monkeypatch) == (name not in GATHERED)
