"""Sizes that stay dynamic in a capture, and those that a program holds for."""

import inspect
import re
from typing import Any
from unittest import mock

import pytest
import sympy  # type: ignore[import-untyped]  # it has no types
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._sympy.functions import Mod

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.conditions import admits, violated
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.program.instead import INSTEAD
from fuseport.exporter.program.sizes import _arithmetic
from fuseport.exporter.program.sizes._arithmetic import holds
from fuseport.tests.test_program import (
    SEQUENCE,
    SIZES,
    assert_same,
    captured,
    cotangents_of,
    eager,
    inputs_of,
)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        down = F.conv1d(x.mT, torch.ones(8, 8, 4), stride=2, padding=1)
        return F.conv_transpose1d(down, torch.ones(8, 8, 4), stride=2, padding=1).mT + x


def test_a_program_knows_the_sizes_it_holds_for() -> None:
    forward = capture_forward(Halves(), inputs_of(SEQUENCE, SIZES), SEQUENCE)
    admitted = [n for n in range(1, 10) if not violated(forward, {"batch": 1, "length": n})]
    assert admitted == [2, 4, 6, 8]


def test_that_sizes_are_in_their_ranges_is_known_without_sympy() -> None:
    forward = capture_forward(Halves(), inputs_of(SEQUENCE, SIZES), SEQUENCE)
    with mock.patch.object(_arithmetic, "_replaced", side_effect=AssertionError("is asked")):
        assert admits(forward, {"batch": 1, "length": 2})
        assert not admits(forward, {"batch": 1, "length": 3})


class UpToTen(nn.Module):
    """Scores of up to ten steps, as decoders of texts have them."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.new_zeros(x.shape[0], 10, 8)
        whole[:, : x.shape[1]] = x
        return whole[:, : x.shape[1]].softmax(1) @ x.mT


def test_a_gradient_holds_up_to_a_bound_that_its_equations_have() -> None:
    module = UpToTen()
    specs, sizes = SEQUENCE, {"batch": 2, "length": 6}
    gradient = capture_gradient(capture_forward(module, inputs_of(specs, sizes), specs))
    for length in 1, 9:
        assert not violated(gradient, {"batch": 2, "length": length})
        inputs = inputs_of(SEQUENCE, {"batch": 2, "length": length})
        cotangents = cotangents_of(module, inputs)
        expected = eager(module, inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)
    assert violated(gradient, {"batch": 2, "length": 11})


class Tokens(nn.Module):
    """As U-Mamba's and SegMamba's layers: what lies behind the channels are so many tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        tokens, dims = x.shape[2:].numel(), x.shape[2:]
        assert x.size() == x.shape
        assert isinstance(dims, torch.Size)
        assert isinstance(dims, tuple)
        mixed = x.reshape(x.shape[0], 1, tokens).mT.cumsum(1)
        return mixed.mT.reshape(x.shape[0], 1, *dims)[:, 0] / tokens + x.new_ones(x.shape[1:])


class Ordered(nn.Module):
    """Indices that are broadcast."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(-1).argsort(1)
        rows = torch.take_along_dim(x, order[..., None], dim=1)
        first = x[:1].take_along_dim(x.argsort(-1), dim=-1)
        return rows + first + torch.take_along_dim(x, order.reshape(-1)[:1])


class Listed(nn.Module):
    """As the transformers of Deformable DETR: sizes of maps, and reference points on them."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        assert torch.equal(torch.tensor([1, 2.5]), torch.as_tensor((1, 2.5)))
        sizes = torch.as_tensor([[length, batch], [batch, 2]], device=x.device)
        halves = torch.tensor((length / 2, 1.5)) * torch.tensor(length)
        points = torch.linspace(0.5, length - 0.5, length, dtype=x.dtype)
        one = torch.linspace(-1, 1, batch)[:, None, None]
        return x * points[:, None] * sizes.sum() + halves.prod() * one


class Powers(nn.Module):
    """As nanoRWKV's decays: of a size, of which torch has no derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid().pow(x.shape[1]) + x.shape[1] ** x + torch.arange(8) ** x.shape[0]


class Products(nn.Module):
    """Of several tensors, whose order the package opt_einsum finds."""

    def forward(self, x: Tensor) -> Tensor:
        assert torch.backends.opt_einsum.is_available()
        return torch.einsum("bld,bmd,bme->ble", x, x.sin(), x.cos())


class Places(nn.Module):
    """As warps and look-ups of optical flow and stereo: places within an image, and rows of half
    its width that are reshaped by that, and so to a size that is 1 in truth."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows, columns = torch.meshgrid(torch.arange(batch), torch.arange(length))
        inside = (9 * x).clamp(0, length - 1) + x.clamp(min=batch / 8) + x.clamp_max(length - 3)
        half = (length + 1) // 2
        pooled = F.avg_pool1d(F.pad(x.mT, (1, 0)), 2).reshape(batch, 8, -1, half).squeeze(2)
        one, two = torch.cat([inside, x.sin()]).split(split_size=batch, dim=0)
        return one * two * (rows + columns)[..., None] + pooled.sum(-1)[:, None]


class Frequencies(nn.Module):
    """As ETSformer's seasons: those of a Fourier transform."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        whole = torch.fft.fftfreq(length, d=0.7)
        half = torch.fft.rfftfreq(n=2 * batch - 1, dtype=x.dtype)
        return (x * whole[:, None]).sin() + half[:, None, None]


class Kronecker(nn.Module):
    """Blocks of one tensor for each number of another, with more dimensions or fewer."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = torch.kron(x[0], x.new_ones(2, 1)).reshape(-1, 2, 8)
        return torch.kron(x, x[0, :, :2]).mean() * x.sin() + blocks.sum(1) * x.kron(x[:1]).sum()


class Transformer(nn.Module):
    """A spatial one, of pictures and of volumes."""

    def forward(self, x: Tensor) -> Tensor:
        turned = x[..., :6].tanh().mean(1).view(-1, 2, 3)
        grid = F.affine_grid(turned, x[:, None].size(), align_corners=False)
        ends = F.affine_grid(turned, [x.shape[0], 1, x.shape[1], 3], align_corners=True)
        volume = torch.cat([turned, turned[:, :1]], 1).repeat(1, 1, 2)[..., :4]
        deep = F.affine_grid(volume, (x.shape[0], 1, 2, x.shape[1], 3), align_corners=False)
        return F.grid_sample(x[:, None], grid, align_corners=False) + (ends.sum() + deep.sum())


class Matrices(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        steps = torch.cat([x, x.cos() + x]).flatten(0, 1).mT
        counts = torch.arange(steps.shape[1]) % 3 + 1
        by = steps[0].sigmoid()
        return {
            "usual": torch.cov(steps, correction=0),
            "counted": steps.cov(fweights=counts, correction=0),
            "weighed": steps.cov(fweights=counts, aweights=by) + steps.cov(aweights=by),
            "whole": torch.cov(counts + x.new_zeros(1), correction=0) + x.sin().sum(),
            "chain": torch.linalg.multi_dot([by, steps.mT, steps, by]) * x.sum(),
            "products": torch.chain_matmul(steps, steps.mT, steps) @ by,
            "correlations": torch.corrcoef(steps) + steps[0].corrcoef(),
        }


class Slopes(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # Torch wants two steps at least, and three for parabolas at the ends.
        longer = torch.cat([x, x.cos(), x.sin() + x], 1)
        places = torch.arange(longer.shape[1], dtype=x.dtype) ** 2
        return {
            "one": torch.gradient(longer, spacing=0.5, dim=1)[0],
            "each": sum(torch.gradient(longer, dim=(1, -1), spacing=[2, 3.0], edge_order=2)),
            "usual": torch.gradient(longer, spacing=None, dim=1)[0],
            "uneven": torch.gradient(longer, spacing=(places,), dim=1, edge_order=2)[0],
        }


class Pools(nn.Module):
    """A size of a pool that is that of its input; and deviations by position."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        deviations, means = torch.std_mean(x, -1, False, True)
        planes = torch.cat([x, x.cos()], 1).mT
        return {
            "height": F.adaptive_max_pool2d(x[:, None] * 2, (None, 3)),
            "width": F.adaptive_max_pool2d(input=planes, output_size=(2, planes.shape[2])),
            "both": F.adaptive_max_pool2d(x, (None, None)),
            "resized": F.interpolate(input=x.mT, scale_factor=1.7, mode="area"),
            "deviations": deviations * means + torch.std_mean(x, False)[0],
        }


class Losses(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        sign, margins = x.detach().sgn(), {"margin": 0.3}
        found = {}
        for kind in ("none", "mean", "sum"):
            hinge = F.hinge_embedding_loss(x, sign, reduction=kind)
            best = x[:, 0].argmax(-1)
            found[f"entropy_{kind}"] = F.cross_entropy(x[:, 0] + x[:, -1], best, reduction=kind)
            found[kind] = F.margin_ranking_loss(x, x * 2, sign, reduction=kind, **margins) + hinge
        start = (x.sum() > 0).long()
        return {**found, "signs": x.sgn() * x, "part": torch.narrow(x, 2, start, 3) * x[..., :3]}


class Fused(nn.Module):
    """A loss in parts, whose gradients torch computes at once, and which it has since 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(x.shape[0] * x.shape[1]) % 5
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
        weight, bias = self.head.parameters()
        return F.linear_cross_entropy(
            x.flatten(0, 1), weight, target, linear_bias=bias, options=options
        )


MODULES = (
    *([Fused()] if hasattr(F, "linear_cross_entropy") else []),
    Losses(),
    Slopes(),
    Pools(),
    Matrices(),
    Transformer(),
    Tokens(),
    Ordered(),
    Listed(),
    Powers(),
    Products(),
    Places(),
    Frequencies(),
    Kronecker(),
)


@pytest.mark.parametrize("module", MODULES)
def test_sizes_stay_dynamic(module: nn.Module) -> None:
    forward, gradient = captured(module)
    for sizes in ({"batch": 1, "length": 1}, {"batch": 3, "length": 7}):
        assert not violated(forward, sizes)
        inputs = inputs_of(SEQUENCE, sizes)
        cotangents = cotangents_of(module, inputs)
        expected = eager(module, inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)


class Stem(nn.Module):
    """As U-nets behind a stem of 7 with stride 2: sizes that sympy has no solution of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, 4, 7, 2, 3)
        self.down = nn.ModuleList(nn.Conv1d(4, 4, 2, 2) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose1d(4, 4, 2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x.mT), [x.mT[:, :4]]
        for layer in self.down:
            skips.append(x)
            x = layer(x)
        for layer in self.up:
            x = torch.cat([layer(x), skips.pop()], 1)[:, :4]
        return x


def test_sizes_without_a_solution_fix_none() -> None:
    torch.manual_seed(0)
    module, sizes = Stem().eval(), {"batch": 2, "length": 32}
    forward = capture_forward(module, inputs_of(SEQUENCE, sizes), SEQUENCE)
    admitted = [n for n in range(1, 100) if not violated(forward, {"batch": 1, "length": n})]
    assert admitted == [16, 32, 48, 64, 80, 96]
    gradient = capture_gradient(forward)
    for length in (16, 80):
        inputs = inputs_of(SEQUENCE, {"batch": 3, "length": length})
        cotangents = cotangents_of(module, inputs)
        expected = eager(module, inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


class Region(nn.Module):
    """Without gradients, and of it a size is used afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            last = x.shape[1] - 1
            first = x[:, :1].exp()
        return x * last + first


def test_dimensions_that_come_out_as_one_are_refused() -> None:
    spec = TensorSpec("x", "float32", ("batch", "height", "width"))
    with pytest.raises(ExportFailed, match="height and width come out as one size: give both"):
        capture_forward(Square(), {"x": torch.randn(2, 8, 8)}, [spec])


def test_a_size_may_come_from_a_region_without_gradients() -> None:
    forward, _ = captured(Region())
    for length in (1, 5):
        x = torch.randn(2, length, SEQUENCE[0].dims[-1])
        torch.testing.assert_close(forward.exported.module(check_guards=False)(x), Region()(x))


def test_a_quotient_by_a_size_of_zero_holds_for_none() -> None:
    height = sympy.Symbol("s0", integer=True)
    condition = sympy.Eq(Mod(8, height // 8) + sympy.Function("unknown")(height), 0)
    assert not holds(condition, {height: 0})


class Shifted(nn.Module):
    """Adds in place to all rows but the first."""

    def forward(self, x: Tensor) -> Tensor:
        sums = x.clone()
        sums[:, 1:] += x[:, :-1]
        sums.movedim(2, 0)[:, 1:] += x.movedim(2, 0)[:, :-1]
        return sums


class Padded(nn.Module):
    """One more row than there are in the batch, in fours: equations and congruences of that."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(1, keepdim=True).expand(-1, x.shape[0] + 1, -1)
        batch, count, width = rows.shape
        return F.pad(rows, (0, 0, 0, -count % 4)).view(batch, -1, 4, width).mean(2)


class Masked(nn.Module):
    """Writes a number into the diagonal of a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.zeros(x.shape[1], x.shape[1] + 1).fill_diagonal_(0.5)
        return (x @ x.mT).exp().cumsum(-1) + scores[:, :-1].fill_diagonal_(2)


@pytest.mark.parametrize("kind", [Shifted, Padded, Masked])
def test_nothing_is_asked_of_sizes(kind: type[nn.Module]) -> None:
    specs = (TensorSpec("x", "float32", ("batch", "length", 6)),)
    program = capture_forward(kind(), {"x": torch.randn(2, 5, 6)}, specs)
    for batch, length in ((1, 1), (1, 2), (2, 1), (3, 4), (6, 5)):
        x = torch.randn(batch, length, 6, generator=torch.Generator().manual_seed(batch))
        torch.testing.assert_close(program.exported.module()(x), kind()(x))


KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
NAMED = {
    func: names
    for func, form in INSTEAD.items()
    if not isinstance(form, type)
    and not getattr(func, "__name__", "__").startswith("__")
    and (names := [p.name for p in inspect.signature(form).parameters.values() if p.kind in KINDS])
}


@pytest.mark.parametrize("func", NAMED, ids=lambda func: func.__qualname__)
def test_what_is_computed_instead_takes_arguments_by_the_same_names(func: Any) -> None:
    usage = re.match(r"\s*[\w.]+\((.*?)\)", func.__doc__, re.DOTALL)
    theirs = re.findall(r"\w+", usage[1]) if usage else inspect.signature(func).parameters
    method = getattr(Tensor, func.__name__, None) is func
    assert set(NAMED[func][method:]) <= set(theirs)
