"""What Triton's language means, as kernels of code's own are computed by torch; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims

with shims.installed("triton"):  # by name: it replaces a Triton that is there
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


SCALE = 2.0


def numbers(scale: float) -> Any:
    @triton.jit
    def kernel(x, out, at, HALF: tl.constexpr):
        a, b = tl.load(x), tl.load(x + 1)
        tl.store(out + at, a * 1.0 + b)
        total, zero = 0.0, 0
        total += a
        total += b
        tl.store(out + at + 1, total)
        first: tl.constexpr = HALF // 2
        whole = HALF * 2
        tl.store(out + 2 + tl.arange(0, whole), tl.full([first * 4], scale, tl.float32))
        tl.store(out + 6, zero.to(tl.float32) + a.to(x.dtype.element_ty))

    return kernel


def test_a_number_with_a_name_is_float32_and_another_what_it_meets() -> None:
    """Of 2048 and 1, half numbers do not have the sum."""
    out = torch.zeros(7)
    numbers(SCALE)[(1,)](torch.tensor([2048, 1], dtype=torch.float16), out, 0, HALF=2)
    assert out.tolist() == [2048, 2049, 2, 2, 2, 2, 2048]


def test_a_kernel_without_its_text_is_computed_as_python_has_it() -> None:
    scope: dict[str, Any] = {"triton": triton, "tl": tl}
    exec("def kernel(x):\n    two = 2\n    tl.store(x, tl.load(x) * two)", scope)
    x = torch.ones(2)
    triton.jit(scope["kernel"])[(1,)](x)
    assert x.tolist() == [2, 1]


@triton.jit
def halves_kernel(x, y, out, wide, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at, at < n), tl.load(y + at, at < n)
    tl.store(out + at, tl.where(a > 0, a * b + 1.0, b / 3), at < n)
    tl.store(wide + at, (a.to(tl.float32) * b).to(tl.float16) + tl.cast(b, tl.float32), at < n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_numbers_are_rounded_where_triton_rounds_them(dtype: torch.dtype) -> None:
    x, y = drawn(7).to(dtype), drawn(7, seed=1).to(dtype)
    out, wide = torch.empty(7, dtype=dtype), torch.empty(7)
    halves_kernel[(1,)](x, y, out, wide, 7, 8)
    # Divided in float32, multiplied and added one after the other in the half dtype.
    expected = torch.where(x > 0, (x * y + 1), (y.float() / 3).to(dtype))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    rounded = (x.float() * y.float()).to(torch.float16).float() + y.float()
    torch.testing.assert_close(wide, rounded, rtol=0, atol=0)


@triton.jit
def integers_kernel(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    x, y = tl.load(a + at, mask, other=1), tl.load(b + at, mask, other=1)
    tl.store(out + at, x // y, mask)
    tl.store(out + n + at, x % y, mask)
    tl.store(out + 2 * n + at, (x << 2) ^ (y & 6) | (x >> 1), mask)
    tl.store(out + 3 * n + at, tl.maximum(x, y) - tl.abs(x), mask)
    tl.store(out + 4 * n + at, (x / y).to(tl.int32), mask)
    tl.store(out + 5 * n + at, ((x > y) & ~(y > 0)).to(tl.int32), mask)


def test_integers_are_divided_as_c_does() -> None:
    a, b = [7, -7, 7, -7, 6, 0, -9], [2, 2, -2, -2, 3, 5, -4]
    out = torch.empty(6, 7, dtype=torch.int32)
    x, y = (torch.tensor(each, dtype=torch.int32) for each in (a, b))
    integers_kernel[(1,)](x, y, out, 7, 8)
    pairs = list(zip(a, b, strict=True))
    assert out.tolist() == [
        [int(i / j) for i, j in pairs],
        [i - j * int(i / j) for i, j in pairs],
        [(i << 2) ^ (j & 6) | (i >> 1) for i, j in pairs],
        [max(i, j) - abs(i) for i, j in pairs],
        [int(i / j) for i, j in pairs],
        [int(i > j and j <= 0) for i, j in pairs],
    ]


@triton.jit
def packed_bits_kernel(words, out, SHIFTS: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, SHIFTS)
    word = tl.load(words + row)
    tl.store(out + row * SHIFTS + at, ((word >> (at * 4)) & 0xF).to(tl.float32) - 8)


def test_bits_of_words() -> None:
    words = torch.tensor([0x76543210, -1, 0x0F0F], dtype=torch.int32)
    out = torch.empty(3, 8)
    packed_bits_kernel[(3,)](words, out, SHIFTS=8)
    assert (out + 8).tolist() == [[(w >> 4 * i) & 15 for i in range(8)] for w in words.tolist()]


@triton.jit
def bitcast_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.int32, bitcast=True) & 0x7FFFFFFF)


def test_the_bits_of_numbers() -> None:
    x, out = drawn(4), torch.empty(4, dtype=torch.int32)
    bitcast_kernel[(1,)](x, out, 4)
    assert torch.equal(out.view(torch.float32), x.abs())


@triton.jit
def functions_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(out + at, tl.sigmoid(v) + tl.math.exp2(v) - tl.erf(v))
    tl.store(out + BLOCK + at, libdevice.tanh(v) + libdevice.log1p(v * v) * tl.cos(v))
    tl.store(out + 2 * BLOCK + at, tl.clamp(v, -0.5, 0.5) + tl.fma(v, v, 2.0) + tl.floor(v))
    tl.store(out + 3 * BLOCK + at, tl.softmax(v) + tl.sqrt(tl.abs(v)) + libdevice.pow(v, 2.0))


def test_functions_of_numbers() -> None:
    x, out = drawn(8), torch.empty(4, 8)
    functions_kernel[(1,)](x, out, 8)
    v = x.double()
    expected = torch.stack(
        [
            v.sigmoid() + v.exp2() - v.erf(),
            v.tanh() + (v * v).log1p() * v.cos(),
            v.clamp(-0.5, 0.5) + v * v + 2 + v.floor(),
            v.softmax(0) + v.abs().sqrt() + v**2,
        ]
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


# What is around a kernel.


@triton.jit
def moved_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(at + out, tl.load(1 + x + at, at + 1 < n), at < n)


def test_pointers_are_added_to_numbers_too() -> None:
    x, out = drawn(5), torch.empty(5)
    moved_kernel[(1,)](x, out, 5, 8)
    assert torch.equal(out, torch.cat([x[1:], torch.zeros(1)]))


ROUNDS = tl.constexpr(3)
OFFSET: tl.constexpr = 2


@triton.jit
def twice_and_square(x, SQUARED: tl.constexpr = True):
    if SQUARED:
        return 2 * x, x * x
    return 2 * x, x


def cleared(arguments: dict[str, Any]) -> None:
    arguments["out"].zero_()


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 4}, num_warps=2, num_stages=1, pre_hook=cleared),
        triton.Config({"BLOCK": 8}),
    ],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, out, n, SQUARED: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 4)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at) if EVEN else tl.load(x + at, mask=at < n, other=0.0)
    double, square = twice_and_square(v, SQUARED)
    for i in tl.static_range(ROUNDS):
        double += i * square + OFFSET
    if EVEN:
        tl.store(out + at, double)
    else:
        tl.store(out + at, double, mask=at < n)
    tl.atomic_add(out + n, tl.sum(v, axis=0))


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("n", [8, 7])
def test_the_first_config_its_hook_and_heuristics_are_taken(n: int, squared: bool) -> None:
    x, out = drawn(n), torch.full([n + 1], torch.nan)
    grids: list[int] = []

    def grid(meta: dict[str, Any]) -> tuple[int]:
        grids.append(triton.cdiv(n, meta["BLOCK"]))
        return (grids[-1],)

    tuned_kernel[grid](x, out, n, SQUARED=squared)
    assert grids == [2]
    expected = 2 * x + 3 * (x * x if squared else x) + 6
    torch.testing.assert_close(out, torch.cat([expected, x.sum()[None]]))


@triton.jit
def sized_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr):
    width: tl.constexpr = triton.next_power_of_2(N)
    at = tl.arange(0, width)
    for part in range(triton.cdiv(N, BLOCK)):
        mask = (at >= part * BLOCK) & (at < N) & (at < (part + 1) * BLOCK)
        tl.store(out + at, tl.load(x + at, mask=mask) + width * part, mask=mask)


def test_kernels_compute_sizes_by_functions_of_triton_s() -> None:
    x, out = drawn(5), torch.empty(5)
    sized_kernel[(1,)](x, out, 5, 2)
    torch.testing.assert_close(out, x + 8 * torch.tensor([0, 0, 1, 1, 2]))


@triton.jit
def optional_kernel(x, bias, out, n, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    if HAS_BIAS:
        v += tl.load(bias + at, mask=at < n)
    if bias is None:
        v = -v
    tl.store(out + at, v, mask=at < n)


def test_an_argument_may_be_none() -> None:
    x, bias, out = drawn(5), drawn(5, seed=1), torch.empty(5)
    optional_kernel[(1,)](x, bias, out, 5, True, BLOCK=8)
    assert torch.equal(out, x + bias)
    optional_kernel[(1,)](x, None, out, 5, False, BLOCK=8)
    assert torch.equal(out, -x)


@triton.jit
def several_kernel(of, outs, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for i in tl.static_range(len(of)):
        tl.store(outs[i] + at, tl.load(of[i] + at, at < n) * (i + 1), at < n)


def test_arguments_may_be_tuples_of_tensors() -> None:
    of, outs = (drawn(5), drawn(5, seed=1)), (torch.empty(5), torch.empty(5))
    several_kernel[(1,)](of, outs, 5, 8)
    assert torch.equal(outs[0], of[0])
    assert torch.equal(outs[1], 2 * of[1])


@triton.jit
def cumulative_kernel(x, n, BLOCK: tl.constexpr):
    """Each program reads what the one before has written."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    if row > 0:
        before = tl.load(x + (row - 1) * n + at, at < n)
        tl.store(x + row * n + at, tl.load(x + row * n + at, at < n) + before, at < n)


def test_programs_that_go_their_own_way_see_what_those_before_have_stored() -> None:
    x = drawn(4, 5)
    expected = x.cumsum(0)
    cumulative_kernel[(4,)](x, 5, 8)
    torch.testing.assert_close(x, expected)


# Beside a tensor.


@triton.jit
def copy_kernel(x, out, n, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + shift, mask=at < n), mask=at < n)


@pytest.mark.parametrize(("shift", "where"), [(1, "x at 8"), (-1, "x at -1"), (100, "x at 107")])
def test_reading_beside_a_tensor_is_an_error(shift: int, where: str) -> None:
    x, out = drawn(8), torch.empty(8)
    with pytest.raises(IndexError, match=f"it reads or writes {where}, which has 8 elements"):
        copy_kernel[(2,)](x, out, 8, shift, BLOCK=4)


def test_writing_beside_a_tensor_is_an_error_and_writes_nothing() -> None:
    out = torch.zeros(5)
    with pytest.raises(IndexError, match="out at 7, which has 5 elements"):
        copy_kernel[(2,)](drawn(8), out, 8, 0, BLOCK=4)
    assert not out.any()


def test_what_a_mask_leaves_out_is_not_read() -> None:
    x, out = drawn(8), torch.zeros(8)
    copy_kernel[(4,)](x, out, 6, 2, BLOCK=4)
    assert torch.equal(out, torch.cat([x[2:], torch.zeros(2)]))


def test_no_program_stores_nothing() -> None:
    out = torch.ones(3)
    copy_kernel[(0,)](drawn(3), out, 3, 0, BLOCK=4)
    assert torch.equal(out, torch.ones(3))


# What has no form in torch.


@triton.jit
def assembly_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.inline_asm_elementwise("neg $0, $1;", "=r,r", [at], tl.int32, True, 1))


@triton.jit
def random_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.randint(3, at))


@triton.jit
def described_kernel(x, BLOCK: tl.constexpr):
    tl.make_tensor_descriptor(x, [4], [1], [BLOCK], padding_option="nan").load([0])


@triton.jit
def branch_kernel(x, BLOCK: tl.constexpr):
    if tl.load(x + tl.arange(0, BLOCK)) > 0:
        tl.store(x, 0.0)


@triton.jit
def recast_kernel(x, BLOCK: tl.constexpr):
    at = x.to(tl.pointer_type(tl.int32))
    tl.store(at, 0)


@triton.jit
def indexed_kernel(x, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x + tl.arange(0, BLOCK))[0])


@triton.jit
def nowhere_kernel(x, BLOCK: tl.constexpr):
    tl.store(BLOCK, 0.0)


@triton.jit
def by_place_kernel(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)[:, None] * 0
    tl.store(at, tl.dot(tl.load(at), tl.load(at), True))


@triton.jit
def downcast_kernel(x, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x).to(tl.float16, fp_downcast_rounding="rtz"))


@triton.jit
def by_method_kernel(x, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x).dot_scaled(BLOCK))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (assembly_kernel, "triton.language.inline_asm_elementwise has no form in torch here"),
        (random_kernel, "triton.language.randint has no form in torch here"),
        (described_kernel, "a tensor descriptor with nan beside the tensor"),
        (branch_kernel, "which way a kernel goes hangs on a block of .4,. numbers"),
        (recast_kernel, "a pointer to fp32 is taken for one to"),
        (indexed_kernel, "a block is indexed by 0, where only `:` and None are known"),
        (nowhere_kernel, "it reads or writes at 4, which is no pointer"),
        (by_place_kernel, "a product with options by their places"),
        (downcast_kernel, "numbers are rounded by 'rtz'"),
        (by_method_kernel, "triton.language.dot_scaled has no form in torch here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_has_no_form_in_torch_is_refused(kernel: Any, reason: str) -> None:
    x = drawn(4)
    before = x.clone()
    with pytest.raises(RuntimeError, match=rf"{kernel.__name__} .*finds no form of it.*{reason}"):
        kernel[(1,)](x, BLOCK=4)
    assert torch.equal(x, before)


@triton.jit
def doubled_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, at < n), at < n)


def overlapping(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:6].view(2, 3), x[2:6]


def of_one_element(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[2:], x[:1].expand(4)


def windows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.as_strided((3, 3), (2, 1)), torch.empty(9)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (overlapping, "it stores to out, which may be a part of x"),
        (of_one_element, "it stores to out, of which several places are one element"),
        (windows, r"x has the strides \(2, 1\) for the sizes \(3, 3\)"),
    ],
    ids=["overlapping", "expanded", "windows"],
)
def test_tensors_that_share_elements_are_refused(of: Callable[..., Any], reason: str) -> None:
    x, out = of(drawn(8))
    with pytest.raises(RuntimeError, match=reason):
        doubled_kernel[(1,)](x, out, 1, BLOCK=4)


def test_two_arguments_may_be_one_tensor() -> None:
    x = drawn(4)
    expected = 2 * x
    doubled_kernel[(1,)](x, x, 4, BLOCK=4)
    assert torch.equal(x, expected)


@triton.jit
def read_again_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < n), at < n)
    tl.store(out + at, tl.load(x + at, at < n), at < n)


def test_two_views_of_the_same_elements_are_one_memory() -> None:
    x, out = drawn(4), torch.empty(4)
    expected = 2 * x
    read_again_kernel[(1,)](x.view(2, 2)[:, :].view(4), x[:], out, 4, BLOCK=4)
    assert torch.equal(x, expected)
    assert torch.equal(out, expected)


@triton.jit
def shifted_kernel(x, out, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What is above, and to the left, of each place; nan, and 0, beside the tensor."""
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    above = tl.make_block_ptr(x, (M, N), (N, 1), (row - 1, col), (ROWS, COLS), (1, 0))
    left = tl.make_block_ptr(x, (M, N), (N, 1), (row, col - 1), (ROWS, COLS), (1, 0))
    to = tl.make_block_ptr(out, (M, N), (N, 1), (row, col), (ROWS, COLS), (1, 0))
    first = tl.load(above, boundary_check=(0, 1), padding_option="nan")
    second = tl.load(left, boundary_check=(0, 1), padding_option="zero")
    tl.store(to, tl.where(first == first, first, 9.0) + second, boundary_check=(0, 1))


def test_blocks_may_begin_before_a_tensor() -> None:
    x, out = drawn(6, 7), torch.empty(6, 7)
    shifted_kernel[(2, 2)](x, out, 6, 7, ROWS=4, COLS=4)
    above = torch.cat([torch.full((1, 7), 9.0), x[:-1]])
    torch.testing.assert_close(out, above + torch.cat([torch.zeros(6, 1), x[:, :-1]], 1))
