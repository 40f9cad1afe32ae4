"""Triton kernels of code's own, computed by torch, against plain formulas; their gradients too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from fuseport.exporter import shims
from fuseport.exporter.shims._triton.memory import Memory

with shims.installed("triton"):  # by name: it replaces a Triton that is there
    import triton
    import triton.language as tl


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A launch, and what it is to give.

    Args:
        launched: gives of tensors what kernels stored.
        formula: the same of the same tensors.
        inputs: their sizes.
    """

    launched: Callable[..., Any]
    formula: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...]

    def drawn(self) -> list[Tensor]:
        """The inputs."""
        return [drawn(*sizes, seed=i) for i, sizes in enumerate(self.inputs)]


def results(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """What a function gives, and the gradients of that with some cotangents."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    given = function(*leaves)
    out = list(given) if isinstance(given, tuple) else [given]
    of = [o for o in out if o.requires_grad]
    cotangents = [drawn(*o.shape, seed=9 + i).to(o.dtype) for i, o in enumerate(of)]
    found = torch.autograd.grad(of, [x for x in leaves if x.requires_grad], cotangents)
    return [*(o.detach() for o in out), *found]


def computes_its_formula(case: Case) -> None:
    """In float64, with its gradients."""
    inputs = case.drawn()
    found = results(case.launched, inputs)
    expected = results(case.formula, [x.double() for x in inputs])
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-5, atol=2e-6)


def is_the_same_gathered(case: Case, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Holds what views of memory give against gathering, bit for bit; the values, as gradients of
    gathering are sums in another order.

    Returns:
        Whether all was views before.
    """
    asked: list[bool] = []
    box = Memory._box

    def counted(*args: Any) -> Any:
        found = box(*args)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(Memory, "_box", counted)
    by_views = case.launched(*case.drawn())
    monkeypatch.setattr(Memory, "_box", lambda *args: None)
    gathered = case.launched(*case.drawn())
    torch.testing.assert_close(by_views, gathered, rtol=0, atol=0)
    return all(asked)


# One element after the other, with a mask for the last block.


@triton.jit
def axpy_kernel(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, factor * tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


def axpy(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    axpy_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
        x, y, out, x.numel(), 1.5, BLOCK=8, num_warps=2
    )
    return out


# A norm of rows, whose length is no power of 2.


@triton.jit
def norm_kernel(x, weight, out, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    values = tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / n
    centred = tl.where(mask, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / n + eps)
    w = tl.load(weight + at, mask)
    tl.store(out + row * stride + at, (centred * scale * w).to(out.dtype.element_ty), mask)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, n = x.shape
    norm_kernel[(rows,)](x, weight, out, x.stride(0), n, 1e-5, triton.next_power_of_2(n))
    return out


# A product of matrices in groups of rows, with an activation that a helper computes.


@triton.jit
def leaky(x, slope: tl.constexpr):
    return tl.where(x >= 0, x, slope * x)


@triton.jit
def product_kernel(
    a, b, out, M, N, K, a_row, a_col, b_row, b_col, out_row, out_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(axis=0)
    across = tl.cdiv(N, COLS)
    group = pid // (GROUP * across)
    rows = min(tl.cdiv(M, ROWS) - group * GROUP, GROUP)
    row = group * GROUP + (pid % (GROUP * across)) % rows
    col = (pid % (GROUP * across)) // rows
    at_m = (row * ROWS + tl.arange(0, ROWS)) % M
    at_n = (col * COLS + tl.arange(0, COLS)) % N
    at_k = tl.arange(0, INNER)
    a_at = a + (at_m[:, None] * a_row + at_k[None, :] * a_col)
    b_at = b + (at_k[:, None] * b_row + at_n[None, :] * b_col)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, INNER)):
        left = tl.load(a_at, mask=at_k[None, :] < K - k * INNER, other=0.0)
        right = tl.load(b_at, mask=at_k[:, None] < K - k * INNER, other=0.0)
        total = tl.dot(left, right, total)
        a_at += INNER * a_col
        b_at += INNER * b_row
    if ACTIVATION == "leaky":
        total = leaky(total, 0.1)
    at_m = row * ROWS + tl.arange(0, ROWS)
    at_n = col * COLS + tl.arange(0, COLS)
    mask = (at_m[:, None] < M) & (at_n[None, :] < N)
    tl.store(out + out_row * at_m[:, None] + out_col * at_n[None, :], total, mask=mask)


def product(a: Tensor, b: Tensor, activation: str = "leaky") -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n)
    grid = (triton.cdiv(m, 16) * triton.cdiv(n, 16),)
    product_kernel[grid](
        a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(), 16, 16, 16, 2, activation
    )
    return out


# Pointers to blocks, moved, with bounds that are checked; and descriptors of tensors.


@triton.jit
def blocks_kernel(a, b, out, M, N, K, SIDE: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1)
    left = tl.make_block_ptr(a, (M, K), (K, 1), (row * SIDE, 0), (SIDE, SIDE), (1, 0))
    right = tl.make_block_ptr(
        base=b, shape=(K, N), strides=(N, 1), offsets=(0, col * SIDE), block_shape=(SIDE, SIDE),
        order=(1, 0),
    )  # fmt: skip
    total = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for _ in range(0, K, SIDE):
        x = tl.load(left, boundary_check=(0, 1), padding_option="zero")
        y = tl.load(right, boundary_check=(0, 1))
        total += tl.dot(x, y)
        left = tl.advance(left, (0, SIDE))
        right = tl.advance(right, (SIDE, 0))
    to = tl.make_block_ptr(out, (M, N), (N, 1), (row * SIDE, col * SIDE), (SIDE, SIDE), (1, 0))
    tl.store(to, total.to(to.dtype.element_ty), boundary_check=(0, 1))


def by_blocks(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n)
    blocks_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 16))](a, b, out, m, n, k, SIDE=16)
    return out


@triton.jit
def transposed_kernel(x, out, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[ROWS, COLS])
    target = tl.make_tensor_descriptor(out, shape=[N, M], strides=[M, 1], block_shape=[COLS, ROWS])
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    target.store([col, row], source.load([row, col]).T * 2)


def transposed(x: Tensor) -> Tensor:
    (m, n), out = x.shape, x.new_empty(x.shape[1], x.shape[0])
    transposed_kernel[(triton.cdiv(m, 8), triton.cdiv(n, 8))](x, out, m, n, 8, 8)
    return out


# Rows that several programs share, along three axes of the grid.


@triton.jit
def parts_kernel(x, out, x_batch, x_row, out_batch, out_row, n, BLOCK: tl.constexpr):
    batch, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + batch * x_batch + row * x_row + at, mask=at < n, other=-float("inf"))
    largest = tl.max(values, axis=0)
    total = tl.sum(tl.exp(values - largest), axis=0)
    tl.store(out + batch * out_batch + row * out_row + part, largest + tl.log(total))


@triton.jit
def joined_kernel(parts, out, rows, number, BLOCK: tl.constexpr):
    batch, row = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    where = (batch * tl.num_programs(1) + row) * number + at
    values = tl.load(parts + where, mask=at < number, other=-float("inf"))
    largest = tl.max(values, 0)
    tl.store(out + batch * rows + row, largest + tl.log(tl.sum(tl.exp(values - largest), 0)))


def log_sum(x: Tensor) -> Tensor:
    batch, rows, n = x.shape
    number = triton.cdiv(n, 8)
    parts, out = x.new_empty(batch, rows, number), x.new_empty(batch, rows)
    parts_kernel[(batch, rows, number)](x, parts, *x.stride()[:2], *parts.stride()[:2], n, 8)
    joined_kernel[(batch, rows)](parts, out, rows, number, triton.next_power_of_2(number))
    return out


# Tensors whose elements are not one after the other.


@triton.jit
def strided_kernel(x, y, out, rows, cols, x0, x1, y0, y1, o0, o1, SIDE: tl.constexpr):
    i = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    j = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    mask = (i < rows) & (j < cols)
    value = tl.load(x + i * x0 + j * x1, mask) * tl.load(y + i * y0 + j * y1, mask)
    tl.store(out + i * o0 + j * o1, value, mask)


def strided(x: Tensor, y: Tensor, more: int = 0, step: int = 2) -> Tensor:
    rows, cols = x.shape
    out = x.new_zeros(rows + 1, step * cols + more)[1:, : step * cols : step]
    grid = (triton.cdiv(rows, 4), triton.cdiv(cols, 4))
    strided_kernel[grid](x, y, out, rows, cols, *x.stride(), *y.stride(), *out.stride(), SIDE=4)
    return out


def of_views(of_x: Callable[[Tensor], Tensor], *sizes: int) -> Case:
    """A case of a view of a tensor, times a tensor."""
    rows, cols = of_x(torch.empty(sizes)).shape
    return Case(lambda x, y: strided(of_x(x), y), lambda x, y: of_x(x) * y, (sizes, (rows, cols)))


# Masks that begin and end somewhere, and steps.


@triton.jit
def masked_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.arange(0, BLOCK)
    inner = tl.load(x + there, mask=(there >= 2) & (there < n), other=5.0)
    every_other = tl.load(x + 2 * at, mask=2 * at < n, other=-1.0)
    tl.store(out + at, inner * every_other, mask=at > 0)


def masked(x: Tensor) -> Tensor:
    out = x.new_full((16,), 3)
    masked_kernel[(2,)](x, out, len(x), BLOCK=8)
    return out


def masked_formula(x: Tensor) -> Tensor:
    inner = torch.cat([x.new_full((2,), 5), x[2:], x.new_full((8 - len(x),), 5)]).repeat(2)
    every_other = torch.cat([x[::2], x.new_full((16 - (len(x) + 1) // 2,), -1)])
    return torch.cat([x.new_full((1,), 3), (inner * every_other)[1:]])


# In place.


@triton.jit
def softmax_kernel(x, stride, n, BLOCK: tl.constexpr):
    x += tl.program_id(0) * stride
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=float("-inf"))
    powers = tl.exp(values - tl.max(values))
    tl.store(x + at, powers / tl.sum(powers), mask=at < n)


def softmax(x: Tensor) -> Tensor:
    x = x * 1
    softmax_kernel[(len(x),)](x, x.stride(0), x.shape[1], triton.next_power_of_2(x.shape[1]))
    return x


# Sums that many programs add to.


@triton.jit
def columns_kernel(x, out, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(x + i[:, None] * n + j, mask=(i[:, None] < rows) & (j < n), other=0.0)
    tl.atomic_add(out + j, tl.sum(block, axis=0), mask=j < n)


def columns(x: Tensor) -> Tensor:
    rows, n = x.shape
    out = x.new_zeros(n)
    columns_kernel[(triton.cdiv(rows, 2), triton.cdiv(n, 4))](x, out, rows, n, ROWS=2, BLOCK=4)
    return out


@triton.jit
def counted_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + at), mask=at < n)


def counted(x: Tensor) -> Tensor:
    """Every program adds the same."""
    out = x.new_zeros(5)
    counted_kernel[(3,)](torch.cat([x, x[:1]]), out, 5, BLOCK=8)
    return out


@triton.jit
def rows_of_kernel(table, index, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    which = tl.load(index + row).to(tl.int64)
    tl.store(out + row * n + at, tl.load(table + which * n + at, at < n), at < n)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    out = table.new_empty(len(index), table.shape[1])
    rows_of_kernel[(len(index),)](table, index, out, table.shape[1], BLOCK=8)
    return out


@triton.jit
def bins_kernel(index, weight, sums, most, least, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(index + at, at < n, other=0)
    value = tl.load(weight + at, at < n, other=0.0)
    tl.atomic_add(sums + where, value, mask=at < n)
    tl.atomic_max(most + where, value, mask=at < n)
    tl.atomic_min(least + where, value, mask=at < n)


def bins(index: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    found = [torch.zeros(5, dtype=weight.dtype) for _ in range(3)]
    bins_kernel[(triton.cdiv(len(index), 4),)](index, weight, *found, len(index), BLOCK=4)
    return tuple(found)


def bins_formula(index: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    zeros = torch.zeros(5, dtype=weight.dtype)
    least, most = (zeros.scatter_reduce(0, index, weight, by) for by in ("amin", "amax"))
    return zeros.index_add(0, index, weight), most, least


INDEX = torch.tensor([3, 0, 3, 1, 4, 0, 0])
CASES = {
    "elements": Case(axpy, lambda x, y: 1.5 * x + y, ((3, 7), (3, 7))),
    "one block": Case(axpy, lambda x, y: 1.5 * x + y, ((5,), (5,))),
    "norm": Case(
        norm, lambda x, w: torch.layer_norm(x, x.shape[-1:], w, None, 1e-5), ((5, 11), (11,))
    ),
    "product": Case(product, lambda a, b: leaky_relu(a @ b, 0.1), ((50, 40), (40, 35))),
    "transposed product": Case(
        lambda a, b: product(a.mT, b[:, 1:], "none"),
        lambda a, b: a.mT @ b[:, 1:],
        ((19, 17), (19, 22)),
    ),
    "blocks": Case(by_blocks, torch.matmul, ((33, 21), (21, 18))),
    "descriptors": Case(transposed, lambda x: 2 * x.mT, ((12, 20),)),
    "three axes": Case(log_sum, lambda x: x.logsumexp(-1), ((2, 3, 19),)),
    "contiguous": of_views(lambda x: x, 6, 7),
    "transposed": of_views(lambda x: x.mT, 6, 7),
    "every other column": of_views(lambda x: x[:, 1::2], 6, 12),
    "strides of 11 and 2": of_views(lambda x: x[:, 1::2], 6, 11),
    "stored with strides of 11 and 2": Case(
        lambda x, y: strided(x, y, more=1), lambda x, y: x * y, ((6, 5), (6, 5))
    ),
    "stored to a part": Case(
        lambda x, y: strided(x, y, more=3, step=1), lambda x, y: x * y, ((6, 5), (6, 5))
    ),
    "masked": Case(masked, masked_formula, ((7,),)),
    "counted": Case(counted, lambda x: 3 * x[:5], ((7,),)),
    "a part": of_views(lambda x: x[2:, 3:8], 7, 10),
    "expanded": of_views(lambda x: x[:, None].expand(-1, 5), 6),
    "one of several": of_views(lambda x: x[1, :, 2], 3, 5, 4, 6),
    "in place": Case(softmax, lambda x: x.softmax(-1), ((5, 11),)),
    "columns": Case(columns, lambda x: x.sum(0), ((7, 10),)),
    "rows of a table": Case(
        lambda table: rows_of(table, INDEX), lambda table: table[INDEX], ((5, 6),)
    ),
    "bins": Case(lambda x: bins(INDEX, x), lambda x: bins_formula(INDEX, x), ((7,),)),
}
GATHERED = {
    "product": "rows and columns are taken modulo how many there are",
    "transposed product": "likewise",
    "strides of 11 and 2": "11 is no multiple of 2",
    "stored with strides of 11 and 2": "likewise",
    "expanded": "a mask says how often one element is read",
    "rows of a table": "the table says where",
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_its_formula_and_its_gradient(name: str) -> None:
    computes_its_formula(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_views_of_memory_are_what_gathering_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_the_same_gathered(CASES[name], monkeypatch) == (name not in GATHERED)
