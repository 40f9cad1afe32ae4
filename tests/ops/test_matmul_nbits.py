"""The layer of a few bits: its storage value by value, what GPTQ and AWQ save, lesser ISAs."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops import register
from fuseport.ops.matmul_nbits import (
    dequantize_nbits,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    matmul_nbits,
    quantize_nbits,
)
from fuseport.ops.matmul_nbits.storage import BITS, WeightNBits, unpack_codes


@pytest.fixture(autouse=True)
def _native() -> None:
    assert register("matmul_nbits") == {"matmul_nbits": "native"}


def values_of(weight: WeightNBits) -> Tensor:
    stored = (weight.packed, weight.scales, weight.zero_points)
    return dequantize_nbits(*stored, weight.in_features, weight.bits)


def drawn(bits: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator)


def words(rows: list[list[int]], bits: int) -> Tensor:
    """int32, the first code of each 32/bits in the lowest bits."""
    each = 32 // bits
    packed = [
        [
            sum(c << bits * i for i, c in enumerate(row[k : k + each]))
            for k in range(0, len(row), each)
        ]
        for row in rows
    ]
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)


def whole(codes: Tensor, zeros: Tensor, scales: Tensor, group: list[int]) -> Tensor:
    """(out, in) of codes (in, out) and what groups have, (groups, out)."""
    rows = [(codes[i] - zeros[g]) * scales[g] for i, g in enumerate(group)]
    return torch.stack(rows, 1).float()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_storage_is_what_a_loop_makes_of_each_value(bits: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 40) + 0.5
    stored = quantize_nbits(weight, bits, 16, symmetric)
    per_byte, found = 8 // bits, values_of(stored)
    assert stored.packed.shape == (3, 3, 16 // per_byte)
    assert stored.zero_points.shape == (3, -(-3 // per_byte))
    for n in range(3):
        for k in range(40):
            group, place = divmod(k, 16)
            byte = int(stored.packed[n, group, place // per_byte])
            code = byte >> bits * (place % per_byte) & (1 << bits) - 1
            byte = int(stored.zero_points[n, group // per_byte])
            zero = byte >> bits * (group % per_byte) & (1 << bits) - 1
            scale = float(stored.scales[n, group])
            assert float(found[n, k]) == pytest.approx((code - zero) * scale, rel=1e-6)
            # What is beyond the largest code of a symmetric group is cut off.
            far = scale if symmetric else scale / 2
            assert abs(float(weight[n, k] - found[n, k])) <= far * 1.001
            assert not symmetric or zero == 1 << bits - 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("reordered", [False, True])
def test_what_gptq_saves_is_read(bits: int, reordered: bool) -> None:
    inputs, outputs, size = 64, 32, 32
    codes, scales = drawn(bits, inputs, outputs), torch.rand(2, outputs) + 0.5
    zeros = drawn(bits, 2, outputs, seed=1) | 1  # none is 0
    group = [i // size for i in range(inputs)]
    tensors = {
        "l.qweight": words(codes.T.tolist(), bits).T.contiguous(),
        "l.qzeros": words((zeros - 1).tolist(), bits),
        "l.scales": scales,
    }
    if reordered:
        group = [group[i] for i in torch.randperm(inputs).tolist()]
        tensors["l.g_idx"] = torch.tensor(group, dtype=torch.int32)
    expected = whole(codes, zeros, scales, group)
    stored = from_gptq(tensors, "l", bits, size)
    assert (stored.order is not None) == reordered
    order = torch.arange(inputs) if stored.order is None else stored.order
    torch.testing.assert_close(values_of(stored), expected[:, order], rtol=0, atol=0)
    second = {**tensors, "l.qzeros": words(zeros.tolist(), bits)}
    again = from_gptq(second, "l", bits, size, stored_less_one=False)
    assert torch.equal(values_of(again), values_of(stored))


def test_zero_points_of_zero_have_borrowed_from_their_word() -> None:
    """As GPTQModel takes one off whole words, and puts it back."""
    zeros = [0, 8, 0, 0, 15, 3, 0, 1]
    word = torch.tensor([[sum(z << 4 * i for i, z in enumerate(zeros))]]).to(torch.int32)
    tensors = {
        "l.qweight": words(drawn(4, 8, 16).tolist(), 4).T.contiguous(),
        "l.qzeros": word - 0x11111111,
        "l.scales": torch.ones(1, 8),
    }
    assert unpack_codes(from_gptq(tensors, "l", 4, -1).zero_points, 4)[:, 0].tolist() == zeros


def test_a_group_may_be_a_whole_row() -> None:
    codes, scales = drawn(4, 24, 8), torch.rand(1, 8)
    tensors = {
        "l.qweight": words(codes.T.tolist(), 4).T.contiguous(),
        "l.qzeros": words([[7] * 8], 4),
        "l.scales": scales,
        "l.g_idx": torch.zeros(24, dtype=torch.int32),
    }
    stored = from_gptq(tensors, "l", 4, -1)
    assert (stored.group_size, stored.order, stored.in_features) == (32, None, 24)
    expected = whole(codes, torch.full((1, 8), 8), scales, [0] * 24)
    torch.testing.assert_close(values_of(stored), expected, rtol=0, atol=0)


def test_what_awq_saves_is_read() -> None:
    codes, zeros, scales = drawn(4, 48, 16), drawn(4, 3, 16, seed=1), torch.rand(3, 16)
    turned = [8 * block + column for block in (0, 1) for column in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {
        "l.qweight": words(codes[:, turned].tolist(), 4),
        "l.qzeros": words(zeros[:, turned].tolist(), 4),
        "l.scales": scales,
    }
    expected = whole(codes, zeros, scales, [i // 16 for i in range(48)])
    torch.testing.assert_close(values_of(from_awq(tensors, "l", 4, 16)), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="bits must be 4, of AWQ; got 8"):
        from_awq(tensors, "l", 8, 16)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_compressed_tensors_saves_is_read(bits: int, symmetric: bool) -> None:
    inputs, outputs, size = 96, 10, 32
    codes, scales = drawn(bits, inputs, outputs), torch.rand(3, outputs) + 0.5
    zeros = torch.full((3, outputs), 1 << bits - 1) if symmetric else drawn(bits, 3, outputs)
    group = torch.randperm(inputs) // size
    tensors = {
        "l.weight_packed": words(codes.T.tolist(), bits),
        "l.weight_scale": scales.T,
        "l.weight_shape": torch.tensor([outputs, inputs]),
        "l.weight_g_idx": group.int(),
    }
    if not symmetric:
        whole_words = F.pad(zeros, (0, -outputs % (32 // bits)))
        tensors["l.weight_zero_point"] = words(whole_words.tolist(), bits).T
    stored = from_compressed_tensors(tensors, "l", bits, size)
    assert stored.order is not None
    expected = whole(codes, zeros, scales, group.tolist())[:, stored.order]
    torch.testing.assert_close(values_of(stored), expected, rtol=0, atol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "with_bias"), [(1, False), (9, True)])
def test_it_is_a_linear_layer_gradients_included(bits: int, rows: int, with_bias: bool) -> None:
    torch.manual_seed(1)
    stored = quantize_nbits(torch.randn(21, 50), bits, 32)
    x, bias, cotangent = (
        torch.randn(shape, dtype=torch.float64) for shape in ((2, rows, 50), (21,), (2, rows, 21))
    )
    leaves = [x, *([bias] if with_bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    given = bias if with_bias else None
    parts = (stored.packed, stored.scales, stored.zero_points)
    out = matmul_nbits(x, *parts, given, bits, 32)
    weight = dequantize_nbits(stored.packed, stored.scales.double(), stored.zero_points, 50, bits)
    expected = F.linear(x, weight, given)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out, leaves, cotangent)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused_by_name() -> None:
    stored, x = quantize_nbits(torch.randn(6, 32), 4, 16), torch.randn(2, 32)
    packed, scales, zero_points = stored.packed, stored.scales, stored.zero_points
    for expected, arguments in {
        r"bias must be \(out_features,\) = \(6,\)": (scales, zero_points, torch.zeros(5), 4, 16),
        r"scales must be \(out, groups\)": (scales[0], zero_points, None, 4, 16),
        "bits must be 2, 4 or 8; got 3": (scales, zero_points, None, 3, 16),
        "group_size must be a multiple of 16; got 24": (scales, zero_points, None, 4, 24),
        r"packed must be \(out_features, groups": (scales, zero_points, None, 8, 16),
        r"scales must be \(out_features, groups\) = \(6, 2\)": (scales[:, :1], zero_points, None),
        r"zero_points must be \(out_features, gr": (scales, packed[:, 0], None, 4, 16),
        "zero_points must be uint8; got int8": (scales, zero_points.view(torch.int8), None, 4, 16),
    }.items():
        sizes = arguments if len(arguments) > 3 else (*arguments, 4, 16)
        with pytest.raises(ValueError, match=expected):
            matmul_nbits(x, packed, *sizes)
    with pytest.raises(ValueError, match="weight must be finite"):
        quantize_nbits(torch.full((1, 16), float("nan")))


def test_lesser_instruction_sets_are_as_good(
    run_python: Callable[..., "CompletedProcess[str]"],
) -> None:
    code = """if True:
        import torch
        from fuseport.ops import OPS, register
        from fuseport.ops.matmul_nbits.reference import matmul_nbits, matmul_nbits_backward
        assert register("matmul_nbits") == {"matmul_nbits": "native"}
        ops = torch.ops.fuseport
        for case in OPS["matmul_nbits"].cases:
            for dtype in (torch.float32, torch.float64, torch.float16):
                given = list(case.make(dtype, 0).values())
                close = {"rtol": 2e-3 if dtype == torch.float16 else 1e-5, "atol": 2e-4}
                out = matmul_nbits(*given)
                torch.testing.assert_close(ops.matmul_nbits(*given), out, **close)
                rest = (*given[1:4], *given[5:])
                found = ops.matmul_nbits_backward(out, *rest)
                torch.testing.assert_close(found, matmul_nbits_backward(out, *rest), **close)
    """
    for isa in ("baseline", "avx2"):
        done = run_python(code, FUSEPORT_ISA=isa)
        assert done.returncode == 0, (isa, done.stderr)
