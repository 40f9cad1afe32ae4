"""Triton kernels that ask what atomic operations return, and whose programs go in strides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, shims
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.models.user import parse_inputs

with shims.installed("triton"):  # by name: it replaces a Triton that is there
    import triton
    import triton.language as tl

Saved = Callable[..., tuple[Path, str]]


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


# What an atomic operation returns.


@triton.jit
def locked_sum_kernel(x, total, lock, count, n, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows are added to one of a few places, which programs lock one after the other."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    group = row % GROUPS
    values = tl.load(x + row * n + at, at < n, other=0.0)
    while tl.atomic_cas(lock + group, 0, 1) == 1:
        pass
    if tl.load(count + group) == 0:
        tl.atomic_xchg(count + group, 1)
    else:
        values += tl.load(total + group * n + at, at < n)
    tl.store(total + group * n + at, values, at < n)
    tl.debug_barrier()
    tl.atomic_xchg(lock + group, 0)


def test_programs_that_lock_what_they_add_to_run_one_after_the_other() -> None:
    x, total = drawn(7, 5), torch.full((2, 5), torch.nan)
    lock, count = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    locked_sum_kernel[(7,)](x, total, lock, count, 5, GROUPS=2, BLOCK=8)
    torch.testing.assert_close(total, torch.stack([x[::2].sum(0), x[1::2].sum(0)]))
    assert lock.tolist() == [0, 0]
    assert count.tolist() == [1, 1]


@triton.jit
def last_kernel(x, parts, count, out, n, BLOCK: tl.constexpr):
    """Whoever comes last adds up what all have left."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + at, at < n, other=0.0), 0))
    if tl.atomic_add(count, 1) == programs - 1:
        of = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(parts + of, of < programs, other=0.0), 0))


def test_the_last_program_adds_up_what_all_have_left() -> None:
    x, out = drawn(30), torch.empty(1)
    last_kernel[(4,)](x, torch.empty(4), torch.zeros(1, dtype=torch.int32), out, 30, BLOCK=8)
    torch.testing.assert_close(out[0], x.sum())


@triton.jit
def bits_kernel(x, out):
    program = tl.program_id(0)
    value = tl.load(x + program)
    tl.atomic_or(out, value)
    tl.atomic_and(out + 1, value)
    tl.atomic_xor(out + 2, value)
    largest = tl.atomic_max(out + 3, value)
    tl.atomic_min(out + 4, tl.minimum(value, largest * 0 + 100))


def test_operations_on_bits() -> None:
    out = torch.tensor([0, -1, 0, 0, 100], dtype=torch.int32)
    bits_kernel[(3,)](torch.tensor([12, 10, 9], dtype=torch.int32), out)
    assert out.tolist() == [15, 8, 12 ^ 10 ^ 9, 12, 9]


@triton.jit
def counted_kernel(x, count, out, n, BLOCK: tl.constexpr):
    """Where a program writes hangs on which came first."""
    program = tl.program_id(0)
    place = tl.atomic_add(count, 1)
    tl.store(out + place, tl.load(x + program))


@triton.jit
def waiting_kernel(x, count, out, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    while tl.atomic_cas(count, 1 - program, 1 - program) != 1 - program:
        pass
    tl.atomic_xchg(count, program)


@triton.jit
def several_kernel(x, count, out, n, BLOCK: tl.constexpr):
    before = tl.atomic_add(count + tl.arange(0, BLOCK) // 2, 1)
    tl.store(out + tl.arange(0, BLOCK), before.to(tl.float32))


@triton.jit
def exchanged_kernel(x, count, out, n, BLOCK: tl.constexpr):
    tl.atomic_xchg(count + tl.arange(0, BLOCK) * 0, tl.arange(0, BLOCK))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (counted_kernel, "out hangs on the order in which its programs run"),
        (waiting_kernel, "a program waits by triton.language.atomic_cas for what another one does"),
        (several_kernel, "triton.language.atomic_add goes to one place several times at once"),
        (exchanged_kernel, "triton.language.atomic_xchg goes to one place several times at once"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_hangs_on_the_order_of_programs_is_refused(kernel: Any, reason: str) -> None:
    out, count = torch.zeros(4), torch.full([4], 9, dtype=torch.int32)
    if kernel is not waiting_kernel:
        count.zero_()
    before = count.clone()
    with pytest.raises(RuntimeError, match=f"{kernel.__name__} .*finds no form of it.*{reason}"):
        kernel[(2,)](drawn(4), count, out, 4, BLOCK=4)
    assert torch.equal(count, before)
    assert not out.any()


# Programs that go in strides.


@triton.jit
def rows_kernel(x, out, rows, n, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=2):
        at = tl.arange(0, BLOCK)
        values = tl.load(x + row * n + at, at < n, other=-float("inf"))
        above = tl.exp(values - tl.max(values, axis=0))
        tl.store(out + row * n + at, above / tl.sum(above, axis=0), at < n)


@triton.jit
def tiles_kernel(x, out, rows, n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(axis=0)
    tiles = tl.cdiv(n, BLOCK)
    for tile in range(start, rows * tiles, PROGRAMS):
        row, first = tile // tiles, tile % tiles * BLOCK
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(0, 2):
            total += tl.load(x + row * n + at, at < n) * (i + 1)
        tl.store(out + row * n + at, total, at < n)


@triton.jit
def carried_kernel(x, out, rows, n, BLOCK: tl.constexpr):
    """Each program adds up its rows."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        total += tl.load(x + row * n + at, at < n, other=0.0)
    tl.store(out + program * n + at, total, at < n)


@triton.jit
def left_kernel(x, out, rows, n, BLOCK: tl.constexpr):
    """What a row leaves to the next is in memory."""
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        before = tl.load(out + (row - 1) * n + at, (at < n) & (row > 0), other=0.0)
        tl.store(out + row * n + at, before + tl.load(x + row * n + at, at < n), at < n)


@triton.jit
def overwritten_kernel(x, out, rows, n, BLOCK: tl.constexpr):
    """Each row is written over by the next, half by half."""
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        tl.store(out + row + at, tl.load(x + row * n + at, at < n), at < n)
        tl.store(out + rows + n, row)


@triton.jit
def last_row_kernel(x, out, rows, n, BLOCK: tl.constexpr):
    """What a program had in its last turn is added after its loop."""
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        values = tl.load(x + row * n + at, at < n, other=0.0)
    tl.atomic_add(out + at, values, at < n)


@triton.jit
def later_turns_kernel(x, out, rows, n, BLOCK: tl.constexpr):
    """A turn of three programs adds what the one before had, in a name of the loop's own."""
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        values = tl.load(x + row * n + at, at < n, other=0.0)
        if row >= 3:
            values += before  # noqa: F821  # ruff knows of no earlier turn
        before = values  # noqa: F841
        tl.store(out + row * n + at, values, at < n)


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_in_strides_take_each_row_once(programs: int) -> None:
    x = drawn(7, 5)
    out = torch.empty_like(x)
    rows_kernel[(programs,)](x, out, 7, 5, BLOCK=8)
    torch.testing.assert_close(out, x.softmax(1))
    out = torch.empty_like(x)
    tiles_kernel[(programs,)](x, out, 7, 5, programs, BLOCK=4)
    torch.testing.assert_close(out, 3 * x)


def test_names_that_a_turn_leaves_are_kept() -> None:
    x, out = drawn(7, 5), torch.zeros(5)
    last_row_kernel[(3,)](x, out, 7, 5, BLOCK=8)
    torch.testing.assert_close(out, x[4:].sum(0))
    out = torch.empty(7, 5)
    later_turns_kernel[(3,)](x, out, 7, 5, BLOCK=8)
    for first in range(3):
        torch.testing.assert_close(out[first::3], x[first::3].cumsum(0))


def test_what_a_stride_leaves_to_the_next_one_is_kept() -> None:
    x, out = drawn(7, 5), torch.empty(3, 5)
    carried_kernel[(3,)](x, out, 7, 5, BLOCK=8)
    torch.testing.assert_close(out, torch.stack([x[i::3].sum(0) for i in range(3)]))
    out = torch.zeros(7, 5)
    left_kernel[(1,)](x, out, 7, 5, BLOCK=8)
    torch.testing.assert_close(out, x.cumsum(0))
    out = torch.zeros(13)
    overwritten_kernel[(1,)](x, out, 7, 5, BLOCK=8)
    assert torch.equal(out, torch.cat([x[:6, 0], x[6], torch.tensor([0.0, 6.0])]))


STRIDES = """
import torch
import triton
import triton.language as tl
from torch import nn
from triton.runtime import driver

DEVICE = triton.runtime.driver.active.get_active_torch_device()
PROCESSORS = driver.active.utils.get_device_properties(DEVICE.index)["multiprocessor_count"]
BACKEND = triton.runtime.driver.active.get_current_target().backend


@triton.jit
def softmax_kernel(out, x, out_stride, x_stride, rows, n, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    start = tl.program_id(0)
    for row in tl.range(start, rows, tl.num_programs(0), num_stages=DEEP):
        at = tl.arange(0, BLOCK)
        mask = at < n
        values = tl.load(x + row * x_stride + at, mask=mask, other=-float("inf"))
        above = tl.exp(values - tl.max(values, axis=0))
        tl.store(out + row * out_stride + at, above / tl.sum(above, axis=0), mask=mask)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rows, n = x.shape
        out = torch.empty_like(x)
        given = (out, x, x.stride(0), out.stride(0), rows, n)
        block = triton.next_power_of_2(n)
        kernel = softmax_kernel.warmup(*given, BLOCK=block, DEEP=2, num_warps=8, grid=(1,))
        kernel._init_handles()
        assert BACKEND == "cuda"
        each = min(65536 // (kernel.n_regs * 32 * 8), 166912 // kernel.metadata.shared)
        kernel[(min(PROCESSORS * max(each, 1), rows), 1, 1)](*given)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return out * (grad - (grad * out).sum(1, keepdim=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x):
        return Softmax.apply(self.linear(x))
"""


def test_programs_in_strides_over_a_dynamic_dimension_are_exported(
    tmp_path: Path, saved_with: Saved
) -> None:
    checkpoint, model = saved_with(STRIDES, linear=nn.Linear(5, 6))
    given = parse_inputs(["x:[rows,5]"])
    options: Any = {"model": model, "shim": "triton", "inputs": given, "format": "onnx"}
    done = api.export(checkpoint, tmp_path / "bundle", **options)
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert not any("only where" in note for note in done.manifest["notes"])


ROUNDED_UP = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def kernel(x, room, out, heads, n, rounded, BLOCK: tl.constexpr):
    place, at = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        other = start + tl.arange(0, BLOCK)
        keys = tl.load(x + place * n + other, mask=other < n, other=0.0)
        queries = tl.load(x + place * n + at, mask=at < n, other=0.0)
        total += tl.sum(queries[:, None] * keys[None, :], 1)
    tl.store(room + place * rounded + at, total)
    tl.store(out + place * n + at, 2 * tl.load(room + place * rounded + at), mask=at < n)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x):
        x = self.linear(x).transpose(1, 2).contiguous()
        batch, heads, n = x.shape
        rounded = triton.cdiv(n, 4) * 4
        room = torch.empty(batch, heads, rounded, dtype=x.dtype)
        out = torch.empty_like(x)
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]), batch * heads)
        kernel[grid](x, room, out, heads, n, rounded, BLOCK=4)
        return out
"""


def test_room_for_whole_blocks_of_a_dynamic_dimension(tmp_path: Path, saved_with: Saved) -> None:
    """As attention has it for the sums of its rows."""
    checkpoint, model = saved_with(ROUNDED_UP, linear=nn.Linear(5, 6))
    given = parse_inputs(["x:[batch,length,5]"])
    options: Any = {"model": model, "shim": "triton", "inputs": given, "format": "onnx"}
    done = api.export(checkpoint, tmp_path / "bundle", **options)
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()


def test_programs_that_are_as_many_for_any_block_keep_theirs(
    tmp_path: Path, saved_with: Saved
) -> None:
    code = ROUNDED_UP.replace('meta["BLOCK"]', "4")
    code = code.replace("kernel[grid]", "kernel[grid({})]")
    checkpoint, model = saved_with(code, linear=nn.Linear(5, 6))
    given = parse_inputs(["x:[batch,length,5]"])
    options: Any = {"model": model, "shim": "triton", "inputs": given, "format": "onnx"}
    with pytest.raises(FuseportError, match="it repeats something as often as a dynamic dimension"):
        api.export(checkpoint, tmp_path / "bundle", **options)
