"""Plain operators in ONNX at other sizes than those of the export, and names that ONNX lost."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from fuseport.exporter import formats
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import get

IMAGE = TensorSpec("input", "float32", ("batch", 3, "height", "width"))


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def run(program: Program, folder: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    file = folder / f"{program.kind}.onnx"
    if not file.exists():
        formats.get("onnx").write(program, file, formats.Options(folder / "w"))
    return get("onnxruntime").load(file, {}).run(inputs)


def assert_holds(
    function: Callable[..., Tensor], folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Outputs and gradients are eager's, at the sizes of the export and at others."""
    torch.manual_seed(0)
    module = Called(function)
    spec = replace(IMAGE, dtype=str(dtype).removeprefix("torch."))
    forward = capture_forward(module, {"input": torch.randn(2, 3, 8, 12).to(dtype)}, [spec])
    gradient = capture_gradient(forward)
    allowed: dict[str, Any] = {"equal_nan": True}
    if dtype == torch.float64:
        allowed |= {"rtol": 1e-12, "atol": 1e-13}
    for sizes in ((2, 3, 8, 12), (1, 3, 7, 9), (3, 3, 5, 16)):
        x = torch.randn(sizes, dtype=dtype, requires_grad=True)
        y = module(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        given = {"input": x.detach()}
        for program, more in (forward, {}), (gradient, {"cotangent_output": dy}):
            found = run(program, folder, {**given, **more})
            torch.testing.assert_close(found["output"], y.detach(), **allowed)
        torch.testing.assert_close(found["grad/input"], dx, **allowed)


resized = partial(F.interpolate, antialias=True)


RESAMPLING = {
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "whole mean of channels last": lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1),
    "whole mean of a sequence": lambda x: F.adaptive_avg_pool1d(x.flatten(2).mT, 1),
    "whole mean of a volume": lambda x: F.adaptive_avg_pool3d(x[:, None].permute(0, 4, 1, 2, 3), 1),
    "mean past the end": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "mean without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "mean by another divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "antialiased": lambda x: resized(x, mode="bilinear", size=(5, 20)),
    "antialiased by factors": lambda x: resized(x, mode="bilinear", scale_factor=(0.45, 1.7)),
    "antialiased from corner to corner": lambda x: resized(
        x, mode="bilinear", size=(1, 4), align_corners=True
    ),
    "bicubic, antialiased": lambda x: resized(x, mode="bicubic", size=(5, 20)),
    "bicubic, antialiased by a factor": lambda x: resized(x, mode="bicubic", scale_factor=0.4),
    "nearest to a size": lambda x: F.interpolate(x, (11, 7)),
}


@pytest.mark.parametrize("name", RESAMPLING)
def test_resampling_holds_at_other_sizes_than_those_of_the_export(
    name: str, tmp_path: Path
) -> None:
    assert_holds(RESAMPLING[name], tmp_path)


PARTS = {
    "one part": lambda x: x.chunk(1)[0].exp(),
    "equal parts": lambda x: torch.chunk(x.sin(), 2, dim=-1)[1].sum(3) * x.chunk(2, 2)[0].prod(),
    "parts of a size": lambda x: x.exp().split(8, 3)[1].sum(3) * torch.split(x, 4, dim=2)[1].sum(),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_those_of_other_sizes_than_the_export_has(name: str, tmp_path: Path) -> None:
    assert_holds(PARTS[name], tmp_path)


def test_a_form_that_fixes_a_size_is_refused(tmp_path: Path) -> None:
    module = Called(lambda x: torch.ops.aten.chunk.default(x, 2, 3)[1].exp())
    forward = capture_forward(module, {"input": torch.randn(2, 3, 8, 12)}, [IMAGE])
    with pytest.raises(ExportFailed, match="dimension 3 of input input comes out fixed at 12, by"):
        formats.get("onnx").write(forward, tmp_path / "f.onnx", formats.Options(tmp_path / "w"))


# Rows by two indices of 32 bits, and bytes that hold two values each.
BYTES = torch.arange(0, 256, 37, dtype=torch.uint8)
PLACES = torch.tensor([2, 0, -1, 2], dtype=torch.int32)
FEW_BITS = {
    "an index": lambda x: x[:, PLACES] * x.sum(),
    "two indices": lambda x: x[:, PLACES, PLACES.abs()],
    "put": lambda x: torch.index_put(x * 2, (PLACES[:2].abs() % 1,), x[:1].sin()),
    "put at two": lambda x: torch.index_put(x * 2, (PLACES[1:3] * 0, PLACES[1:3]), x[0, :2].sin()),
    "added": lambda x: torch.index_put(x * 2, (PLACES * 0, PLACES), x[0, :1].sin(), True),
    "halves of bytes": lambda x: x[..., None] * torch.cat([BYTES >> 4, BYTES & 15]),
    "shifted to the left": lambda x: x[..., None] * ((BYTES << 3) ^ 5) / 256,
    "by bytes": lambda x: x[..., None] * ((BYTES >> (BYTES & 7)) ^ (BYTES << (BYTES & 3))) / 256,
    "a number by bytes": lambda x: x[..., None] * torch.bitwise_left_shift(3, BYTES & 7) / 256,
}


@pytest.mark.parametrize("name", FEW_BITS)
def test_integers_of_few_bits_are_indices_and_are_shifted(name: str, tmp_path: Path) -> None:
    assert_holds(FEW_BITS[name], tmp_path)


NUMBERS = torch.tensor([0.0, 1e-20, 1e30, math.inf, -3e-4])
FAR = torch.tensor([-30.0, -9, 9, math.inf])
SPECIAL = {
    "erfinv": lambda x: torch.erfinv(x.sin() * 0.9),
    "erfinv of small numbers": lambda x: torch.erfinv(x * 1e-6) * 1e6,
    "erfinv at its ends": lambda x: torch.erfinv(torch.tensor([-1.0, 0, 1, 1.5])) + x[..., None],
    "erfcx of any size": lambda x: (
        torch.special.erfcx(x.abs() * 3 - 1) + torch.special.erfcx(NUMBERS).sum()
    ),
    "log_ndtr of any size": lambda x: (
        torch.special.log_ndtr(x * 2) + torch.special.log_ndtr(FAR).sum()
    ),
    "copysign": lambda x: torch.copysign(x.exp(), torch.stack([x, -0.0 * x.abs()])),
    "hypot": lambda x: torch.hypot(x, x.cos()),
    "hypot of any size": lambda x: x[..., None] + torch.hypot(NUMBERS[:, None], NUMBERS).flatten(),
    "the greatest of all": lambda x: torch.amax(x) * x + x.amin() - x.amax((), True) / 2,
    "the known one": lambda x: (
        torch.fmax(torch.where(x < 0.3, x, math.nan), x[..., :1].cos())
        + torch.fmin(torch.where(x < 0, x, math.nan), torch.where(x < -1, math.nan, x.cos()))
    ),
    "the greater integer": lambda x: torch.fmax(torch.ops.aten.ceil(x * 9).long(), PLACES[0]) * x,
    "log1p": lambda x: torch.log1p(x.sin() * 0.9),
    "log1p of small numbers": lambda x: torch.log1p(x * 1e-6) * 1e6,
    "log1p of any size": lambda x: x[..., None] + torch.log1p(NUMBERS),
    "logsigmoid of any size": lambda x: F.logsigmoid(x * 40 - 20) + F.logsigmoid(x + 12) * 1e5,
    "logaddexp": lambda x: torch.logaddexp(x, x.cos()) + torch.logaddexp(x, x),
    "logaddexp of a small number": lambda x: torch.logaddexp(x * 0, x - 12) * 1e5,
    "logaddexp of any size": lambda x: (
        x[..., None] + torch.logaddexp(-NUMBERS[:, None], -NUMBERS).flatten()
    ),
}


RANGES = {
    "of numbers": lambda x: x[..., :4] * torch.arange(0.0, 4) + torch.arange(1, 5.0),
    "of a size": lambda x: x * torch.arange(0.0, x.shape[3]) + torch.arange(1, x.shape[3] + 1.0),
    "in steps": lambda x: x * torch.arange(0.0, 2 * x.shape[3], 2) * torch.arange(0, 3, 2.0).sum(),
    "of halves": lambda x: x * torch.arange(0.5, x.shape[3]),
    "of another type": lambda x: x * torch.arange(0.0, x.shape[3], dtype=torch.float16),
    "of integers": lambda x: x * torch.arange(0.0, x.shape[3], dtype=torch.int64),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_whose_bounds_are_of_several_types(name: str, tmp_path: Path) -> None:
    assert_holds(RANGES[name], tmp_path)


@pytest.mark.parametrize("name", SPECIAL)
def test_functions_that_onnx_has_not(name: str, tmp_path: Path) -> None:
    assert_holds(SPECIAL[name], tmp_path)


# Numbers that float32 rounds: as operands, sizes, attributes of ONNX and in torch.onnx's own forms.
SQUARE = torch.linspace(-1, 1, 256).reshape(16, 16)
FORMS = {
    "sort": lambda x: torch.sort(x, -1)[0],
    "stable sort of ties, down": lambda x: x.gather(
        1, torch.sort(x.detach().round(), dim=1, descending=True, stable=True)[1]
    ),
    "einsum that broadcasts": lambda x: torch.einsum("bchw,bcw->bchw", x[:, :1], x[:, :, 0]),
    "einsum that does not": lambda x: torch.einsum("bchw,bcw->bhc", x, x[:, :, 0]),
    "a count of elements": lambda x: F.mse_loss(x, x.sin()) * x.numel() + x.mean(),
    "a reshape of what is transposed": lambda x: x.transpose(1, 3).reshape(x.shape[0], -1, 3) ** 2,
    "an index that is filled": lambda x: x.index_fill(1, torch.tensor([1]), 0.5).exp(),
    "gates that are nearly shut": lambda x: torch.sigmoid(x - 11) * 1e5,
    "Huber loss": lambda x: F.huber_loss(x, x.cos(), reduction="none"),
    "losses that leave out a place past the end": lambda x: (
        F.cross_entropy(
            x.mean(1).mT,
            (x[:, 0].argmax(-1) * 2).clamp(max=x.shape[3]),
            ignore_index=x.shape[3],
            label_smoothing=0.1,
        )
        + F.nll_loss(
            x[:, 0, 0], (x[:, 1, 0].argmax(-1) * 2).clamp(max=x.shape[3]), None, None, x.shape[3]
        ).nan_to_num()
    ),
    "regions": lambda x: torch.cond(
        x.shape[2] > 7, lambda y: F.huber_loss(y, y.cos(), reduction="none"), torch.sin, (x,)
    ),
    "a diagonal": lambda x: x.diagonal(2, 3, 2).sin() + x.diagonal(-1, 1, -1).sum(),
    "values put where a mask is": lambda x: x.masked_scatter(x > 0.5, (x * 2).flatten()),
    "values that a mask takes": lambda x: x * x[x > 0].square().mean(),
    "values that a mask selects": lambda x: x * torch.masked_select(x, x[:, :1] > 0).mean(),
    "windows by strides": lambda x: torch.as_strided(
        (2 * x).contiguous(),
        (x.shape[0], x.shape[1], x.shape[2], x.shape[3] - 2, 3),
        (x[0].numel(), x[0, 0].numel(), x.shape[3], 1, 1),
    ).amax(-1),
    "a bilinear form": lambda x: F.bilinear(x, x.cos(), SQUARE[: x.shape[3], : x.shape[3]][None]),
    "padding around a circle": lambda x: F.pad(x, (1, 3, 2, 0), mode="circular").sin(),
    "padding by less than nothing": lambda x: F.pad(x, (0, 0, 1, -1)) + x,
    "frequencies": lambda x: x * torch.fft.fftfreq(x.shape[3]) + torch.fft.rfftfreq(8, 0.3)[4],
    "variance over a size": lambda x: x.var(2, keepdim=True) * x,
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention of rows that a mask leaves nothing of": lambda x: F.scaled_dot_product_attention(
        x, x, x, x[..., :1] + x[..., :1].mT > 1
    ),
    "a number that some of each value is added to": lambda x: (
        x * torch.add(0.5, x.abs(), alpha=(x.shape[3] / x.numel()) ** 0.5)
    ),
    "bounds of two kinds": lambda x: x.clamp(0, 0.7) * x.clamp(min=-1, max=0.5),
    "a branch by a value": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)),
    "a variance beside a branch": lambda x: (
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)) * x.var(-1, True, keepdim=True)
    ),
    "a scan whose state is its output": lambda x: scan(
        lambda h, y: ((h + y).sin(), (h + y).sin()), x.new_zeros(x[:, 0].shape), x.transpose(0, 1)
    )[1],
}


def parted(x: Tensor) -> Tensor:
    """A scan whose derivative has copies of views in it, which torch makes in regions alone."""

    def step(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.split((h + y).sigmoid(), 2, 0)
        return torch.cat([first, second.tanh()], 0), first.exp() + second

    out: Tensor = scan(
        step, x.new_zeros(4, x.shape[3]), x.flatten(0, 2)[:, None].expand(-1, 4, -1)
    )[1]
    return out


FORMS["a scan that splits"] = parted


def banded(x: Tensor) -> Tensor:
    """Rows that each begin one further, as fairseq makes a matrix of a lightweight convolution."""
    rows, length, width = x.shape[0] * x.shape[1], x.shape[2], x.shape[3]
    wide = length + width - 1
    band = x.new_full((rows, length, wide), 0.5)
    band.as_strided((rows, length, width), (length * wide, wide + 1, 1)).copy_(x.flatten(0, 1))
    return band.narrow(2, width - 1, length) @ x.flatten(0, 1)


FORMS["a band by strides"] = banded


@pytest.mark.parametrize("name", FORMS)
def test_what_torch_onnx_has_no_form_of(name: str, tmp_path: Path) -> None:
    assert_holds(FORMS[name], tmp_path)


def test_what_torch_is_told_of_values(tmp_path: Path) -> None:
    """As transformers tells it that maps are as large as it says (RT-DETR v2, D-FINE)."""

    def told(x: Tensor) -> Tensor:
        torch._check_tensor_all(x.abs().amax((1, 2, 3)) >= 0)
        return x.exp()

    assert_holds(told, tmp_path)


def test_what_is_forward_alone(tmp_path: Path) -> None:
    module = Called(lambda x: torch.fft.rfft(x).reshape(x.shape[0], -1).abs())
    forward = capture_forward(module, {"input": torch.randn(2, 3, 8, 12)}, [IMAGE])
    for sizes in ((2, 3, 8, 12), (1, 3, 7, 9), (3, 3, 5, 16)):
        x = torch.randn(sizes)
        found = run(forward, tmp_path, {"input": x})
        torch.testing.assert_close(found["output"], module(x))


def test_outputs_that_are_one_value_keep_their_names(tmp_path: Path) -> None:
    """The gradients of a sum's terms are one cotangent."""
    inputs = {name: torch.randn(2, 3) for name in ("input", "max")}
    specs = [TensorSpec(name, "float32", (2, 3)) for name in inputs]
    forward = capture_forward(Called(torch.add), inputs, specs)
    dy = torch.randn(2, 3)
    found = run(capture_gradient(forward), tmp_path, {**inputs, "cotangent_output": dy})
    assert list(found) == ["output", "grad/input", "grad/max"]
    assert torch.equal(found["grad/input"], dy)
    assert torch.equal(found["grad/max"], dy)
    found = run(forward, tmp_path, inputs)
    assert torch.equal(found["output"], inputs["input"] + inputs["max"])


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1, 3))
        self.mul = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.get_buffer("mean")) * self.mul
        return y - y.mean(1, keepdim=True)


def test_a_buffer_may_be_called_like_an_operator(tmp_path: Path) -> None:
    """torch.onnx calls the values of operators after those."""
    model, x, dy = Centred(), torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    forward = capture_forward(model, {"x": x.detach()}, [TensorSpec("x", "float32", ("batch", 3))])
    found = run(forward, tmp_path, {"x": x.detach()})
    given = {"x": x.detach(), "cotangent_output": dy}
    found |= run(capture_gradient(forward), tmp_path, given)
    torch.testing.assert_close(found["output"], model(x))
    model(x).backward(dy)
    torch.testing.assert_close(found["grad/x"], x.grad)
    torch.testing.assert_close(found["grad/mul"], model.mul.grad)


def test_a_transposed_matrix_times_a_vector_is_right_in_onnx_runtime(tmp_path: Path) -> None:
    """ONNX Runtime itself forgets the transposition."""
    inputs = {"x": torch.randn(3, 2), "v": torch.randn(3)}
    specs = [TensorSpec("x", "float32", ("rows", 2)), TensorSpec("v", "float32", ("rows",))]
    forward = capture_forward(Called(lambda x, v: x.T @ v), inputs, specs)
    found = run(forward, tmp_path, inputs)
    torch.testing.assert_close(found["output"], inputs["x"].T @ inputs["v"])
    dy = torch.randn(2)
    found = run(capture_gradient(forward), tmp_path, {**inputs, "cotangent_output": dy})
    torch.testing.assert_close(found["grad/v"], inputs["x"] @ dy)
    torch.testing.assert_close(found["grad/x"], torch.outer(inputs["v"], dy))


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two sets of them, with one row in both."""
    return x[:, 0], torch.cat([x[:, 0, :1], x[:, 1]], 1)


RANKS = {
    "the second smallest": lambda x: x.kthvalue(2, -1).values,
    "the same in another dimension, which stays": lambda x: x.kthvalue(2, 1, True)[0],
    "median": lambda x: x.median(-1).values,
    "median of a dimension in the middle": lambda x: x.median(2, True).values,
    "median of all": lambda x: x.median(),
    "median beside NaN": lambda x: torch.where(x > 2.2, torch.nan, x).median(-1).values,
    "median of what is not NaN": lambda x: torch.where(x > 0.5, torch.nan, x).nanmedian(-1)[0],
    "the same of all": lambda x: torch.where(x > 0.5, torch.nan, x).nanmedian(),
    "product": lambda x: x.prod(1),
    "product of all, with one 0": lambda x: (x[:, :, :3, :2] - x[0, 0, 0, 0]).prod(),
    "products up to each": lambda x: x.cumprod(1).square(),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_and_products_hold_at_other_sizes(name: str, tmp_path: Path) -> None:
    assert_holds(RANKS[name], tmp_path)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("dim", [None, 0])
def test_numbers_and_rows_that_differ(dtype: str, dim: int | None, tmp_path: Path) -> None:
    def found(x: Tensor) -> Tensor:
        values, place, count = torch.unique(x, dim=dim, return_inverse=True, return_counts=True)
        return torch.cat([part.flatten() for part in (values, place.to(x), count.to(x))])

    draw = partial(torch.randint, 0, 3, generator=torch.Generator().manual_seed(0))
    dtypes = getattr(torch, dtype)
    spec = TensorSpec("x", dtype, ("n", 2), 3)
    program = capture_forward(Called(found), {"x": draw((6, 2)).to(dtypes)}, [spec])
    for n in (6, 1, 9):
        x = draw((n, 2)).to(dtypes)
        assert torch.equal(run(program, tmp_path, {"x": x})["output"], found(x))


def test_a_remainder_of_a_number_that_hangs_on_values(tmp_path: Path) -> None:
    spec = TensorSpec("x", "int64", ("n",), 9)
    by_largest = Called(lambda x: x % x.max().item())
    program = capture_forward(by_largest, {"x": torch.tensor([1, 5, 3, 2])}, [spec])
    for x in (torch.tensor([1, 5, 3, 2]), torch.tensor([4, 3, 8])):
        assert torch.equal(run(program, tmp_path, {"x": x})["output"], x % x.max())


@pytest.mark.parametrize("right", [False, True])
def test_places_in_sorted_values_hold_at_other_sizes(right: bool, tmp_path: Path) -> None:
    """Values that are equal to some, of each kind of arguments; and nothing to be found in."""

    def found(edges: Tensor, x: Tensor) -> Tensor:
        rows, one = edges.sort(-1).values, x[:, :2].reshape(2, -1)
        order = edges.argsort(-1)
        return torch.cat(
            [
                torch.searchsorted(rows, x, right=right),
                torch.searchsorted(edges, x, side="right" if right else "left", sorter=order),
                torch.searchsorted(rows[0], one, right=right).reshape(x.shape[0], -1),
                torch.bucketize(x, rows[0], right=right, out_int32=True).long(),
                torch.searchsorted(rows[0], 2, right=right).expand(x.shape[0], 1),
            ],
            1,
        )

    specs = [TensorSpec(n, "int64", ("batch", d), 6) for n, d in (("edges", "n"), ("x", "m"))]
    draw = partial(torch.randint, 0, 6, generator=torch.Generator().manual_seed(0))
    program = capture_forward(Called(found), {"edges": draw((2, 5)), "x": draw((2, 7))}, specs)
    for batch, n, m in ((2, 5, 7), (1, 9, 2), (4, 1, 3), (2, 0, 4)):
        inputs = {"edges": draw((batch, n)), "x": draw((batch, m))}
        got = run(program, tmp_path, inputs)["output"]
        assert torch.equal(got, found(**inputs))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances_hold_at_other_sizes(p: float, tmp_path: Path) -> None:
    """And where two rows are alike, at which a 2-norm's gradient is 0 for torch."""
    assert_holds(lambda x: torch.cdist(*rows(x), p=p), tmp_path, torch.float64)


def test_what_onnx_has_no_form_of_is_named_whole_and_with_its_layers(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x) + torch.special.bessel_y0(x).mean(-1)

    module = nn.Sequential(nn.Linear(3, 3), Inner(), Called(torch.special.modified_bessel_k0))
    spec = TensorSpec("input", "float32", ("batch", 3, 3))
    program = capture_forward(module, {"input": torch.randn(2, 3, 3)}, [spec])
    said = r"of aten._linalg_svd \(in 1\), aten.special_bessel_y0 \(in 1\), "
    said += r"aten.special_modified_bessel_k0 \(in 2\)$"
    with pytest.raises(ExportFailed, match=said):
        formats.get("onnx").write(program, tmp_path / "f.onnx", formats.Options(tmp_path / "w"))
