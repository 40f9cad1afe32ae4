"""Functions of Triton's language and of what is around kernels, against what torch has of them."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.exporter.shims._triton.random import philox

with shims.installed("triton"):  # by name: it replaces a Triton that is there
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.tools.tensor_descriptor import TensorDescriptor


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


# `and`, `or`, `not`.


@triton.jit
def connected_kernel(x, out, rows, n, bias, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    mask = row < rows and col < n
    value = tl.load(x + row * n + col, mask=mask, other=0.0)
    small = not (value > 0.5 or value < -0.5)
    if bias is not None and bias.dtype.element_ty == tl.float32:
        value += tl.load(bias + col, col < n and rows > 0)
    even = not (row % 2)
    tl.store(out + row * n + col, tl.where(small and even, 9.0, value), mask.logical_and(col < n))


@pytest.mark.parametrize("with_bias", [True, False])
def test_words_between_blocks_are_those_of_each_element(with_bias: bool) -> None:
    x, out, bias = drawn(5, 6), torch.empty(5, 6), drawn(6, seed=1) if with_bias else None
    connected_kernel[(2,)](x, out, 5, 6, bias, ROWS=4, COLS=8)
    kept = (x.abs() <= 0.5) & (torch.arange(5)[:, None] % 2 == 0)
    torch.testing.assert_close(out, torch.where(kept, 9.0, x if bias is None else x + bias))


# Numbers.

ROUNDED = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 8388609.0, -1.2])


@triton.jit
def rounded_kernel(x, out, places, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(out + at, libdevice.round(v))
    tl.store(out + BLOCK + at, libdevice.rint(v))
    tl.store(places + at, libdevice.llrint(v))
    tl.store(places + BLOCK + at, libdevice.float2int_rd(v))


def test_numbers_are_rounded_as_they_say() -> None:
    out, places = torch.empty(2, 8), torch.empty(2, 8, dtype=torch.int64)
    rounded_kernel[(1,)](ROUNDED, out, places, BLOCK=8)
    assert out[0].tolist() == [1, 2, 3, -1, -3, 0, 8388609, -1]  # half away from 0
    assert torch.equal(out[1], ROUNDED.round())  # half to even
    assert torch.equal(places[0], ROUNDED.round().long())
    assert torch.equal(places[1], ROUNDED.floor().long())


@triton.jit
def more_functions_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(out + at, libdevice.cbrt(v) + libdevice.exp10(v) - libdevice.normcdf(v))
    tl.store(out + BLOCK + at, libdevice.saturatef(v) + libdevice.ldexp(v, at) + libdevice.cospi(v))
    tl.store(out + 2 * BLOCK + at, libdevice.int_as_float(libdevice.float_as_int(v)))


def test_more_functions_of_numbers() -> None:
    x, out = drawn(8), torch.empty(3, 8)
    more_functions_kernel[(1,)](x, out, BLOCK=8)
    v = x.double()
    first = v.sign() * v.abs() ** (1 / 3) + 10**v - torch.special.ndtr(v)
    second = v.clamp(0, 1) + v * 2.0 ** torch.arange(8) + (torch.pi * v).cos()
    torch.testing.assert_close(out.double(), torch.stack([first, second, v]), rtol=1e-5, atol=1e-5)


# Blocks.


@triton.jit
def places_kernel(x, places, out, counts, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * BLOCK + at)
    index = tl.load(places + row * BLOCK + at)
    tl.store(out + row * BLOCK + at, tl.gather(v, index, axis=0))
    tl.store(out + row * BLOCK + tl.arange(0, KEPT), tl.topk(v, KEPT), mask=row > 0)
    tl.store(counts + row * 4 + tl.arange(0, 4), tl.histogram(index, 4, mask=at > 0))


def test_places_of_blocks() -> None:
    x, places = drawn(3, 8), torch.randint(0, 8, (3, 8), dtype=torch.int32)
    out, counts = torch.empty(3, 8), torch.empty(3, 4, dtype=torch.int32)
    places_kernel[(3,)](x, places, out, counts, BLOCK=8, KEPT=2)
    expected = x.gather(1, places.long())
    expected[1:, :2] = x[1:].topk(2, 1).values
    assert torch.equal(out, expected)
    found = [[(row[1:] == i).sum().item() for i in range(4)] for row in places]
    assert counts.tolist() == found


@triton.jit
def turned_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    places = at[:, None] * SIZE + at[None, :]
    a, b = tl.load(x + places), tl.load(y + places)
    tl.store(out + places, tl.dot(a, b, trans_b=True) - tl.dot(a, b, trans_a=True))


def test_products_of_matrices_that_are_turned() -> None:
    x, y, out = drawn(16, 16), drawn(16, 16, seed=1), torch.empty(16, 16)
    turned_kernel[(1,)](x, y, out, SIZE=16)
    torch.testing.assert_close(out, x @ y.T - x.T @ y, rtol=1e-5, atol=1e-5)


# Random numbers.


def test_random_words_are_philox_s() -> None:
    """Of Random123's known answers, for 10 rounds."""

    def words(counter: list[int], key: list[int]) -> list[str]:
        each = ([torch.tensor([n]) for n in of] for of in (counter, key))
        return [f"{word.item():08x}" for word in philox(*each, 10)]

    assert words([0] * 4, [0] * 2) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    full = 0xFFFFFFFF
    assert words([full] * 4, [full] * 2) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@triton.jit
def random_kernel(out, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.rand(seed, at))
    tl.store(out + 2 * BLOCK + at, tl.randn(seed, at))


def test_random_numbers_are_those_of_a_seed() -> None:
    out, again, other = torch.empty(4096), torch.empty(4096), torch.empty(4096)
    random_kernel[(2,)](out, 123, BLOCK=1024)
    random_kernel[(2,)](again, 123, BLOCK=1024)
    random_kernel[(2,)](other, 124, BLOCK=1024)
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    uniform, normal = out[:2048], out[2048:]
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.03
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.05


# What is around a kernel.


@triton.constexpr_function
def halved(n: int) -> int:
    return n // 2


@triton.jit
def described_kernel(x, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    half: tl.constexpr = halved(COLS)
    if isinstance(x, tl.tensor_descriptor):
        block = x.load([tl.program_id(0) * ROWS, half])
        out.store([tl.program_id(0) * ROWS, 0], block * 2)


def test_tensors_are_passed_as_descriptors() -> None:
    x, out = drawn(6, 7), torch.zeros(6, 4)
    of = TensorDescriptor(x, x.shape, x.stride(), [4, 8])
    described_kernel[(2,)](of, TensorDescriptor.from_tensor(out, [4, 8]), ROWS=4, COLS=8)
    assert halved(8) == 4
    assert torch.equal(out, torch.cat([2 * x[:, 4:], torch.zeros(6, 1)], 1))


@triton.jit
def bits_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.float32))


def test_bits_of_a_tensor_are_taken_for_numbers_of_another_dtype() -> None:
    x, out = drawn(8), torch.empty(8)
    bits = x.to(torch.float8_e5m2).view(torch.int8)
    bits_kernel[(1,)](triton.reinterpret(bits, tl.float8e5), out, BLOCK=8)
    assert torch.equal(out, x.to(torch.float8_e5m2).float())


ASKED = """
import torch
from fuseport.exporter import shims
from fuseport.exporter.shims._cuda import none_moves, of_cpu_allowed
with shims.installed("triton"), none_moves([]), of_cpu_allowed():
    from triton.runtime import driver
    print(driver.active.get_current_target().backend, driver.active.get_current_stream(0))
    print(driver.active.utils.get_device_properties(0)["multiprocessor_count"])
    processor = torch.cuda.current_device()
    print(processor, torch.cuda.get_device_properties(processor).multi_processor_count)
    with torch.cuda._DeviceGuard(torch.ones(1).device.index):
        print(torch.cuda.get_device_name(0))
"""


def test_what_launchers_ask_of_a_driver_is_answered_for_one_processor() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["cuda", "0", "1", "0", "1", "none"], done.stderr


@triton.jit
def taken_apart_kernel(x, out):
    i, j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    (a, _), b = (tl.load(x + i), 5.0, 6.0), tl.load(x + j), 7.0
    tl.store(out + 2 * i + j, a - b)


@triton.jit
def mask_kernel(x, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(x + at) - (at == 2) + 2 * (1 - (at > 1)))


def test_a_mask_is_subtracted_as_zeros_and_ones() -> None:
    """As off a matrix its diagonal is; torch refuses it."""
    x, out = drawn(4), torch.empty(4)
    mask_kernel[(1,)](x, out)
    assert torch.equal(out, x - torch.tensor([-2.0, -2, 1, 0]))


def test_values_beyond_the_names_are_left() -> None:
    """As Triton's compiler has it, and kernels of Gated DeltaNet's own backward."""
    x, out = drawn(2), torch.empty(4)
    taken_apart_kernel[(2, 2)](x, out)
    assert torch.equal(out, torch.stack([x[0] - x[0], x[0] - x[1], x[1] - x[0], x[1] - x[1]]))
