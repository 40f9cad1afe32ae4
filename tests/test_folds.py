"""Derivatives of sums, products and deviations that are written out, against torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.program.instead._by_values import BY_VALUES
from fuseport.exporter.program.portable import _folds

FUNCTIONS: dict[str, tuple[Any, Callable[[Tensor, int], Tensor]]] = {
    "cumsum": (_folds._CumulativeSum, torch.cumsum),
    "cumprod": (_folds._CumulativeProduct, torch.cumprod),
    "prod": (_folds._Product, lambda x, dim: x.prod(dim, keepdim=True)),
    "std": (_folds._Deviation, lambda x, dim: x.std(dim, correction=1, keepdim=True)),
}


def written_out(name: str, x: Tensor, dim: int) -> Tensor:
    function, _ = FUNCTIONS[name]
    out: Tensor = function.apply(x, [dim], 1) if name == "std" else function.apply(x, dim)
    return out


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [0, 1, 2, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_they_are_torchs_whatever_is_zero(name: str, size: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(size)
    shape = (size, 9) if dim == 0 else (9, size)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Rows without a zero, with one, and with several.
    x = torch.where(torch.rand(shape, generator=generator) < 0.3, 0, x).requires_grad_()
    wanted, found = FUNCTIONS[name][1](x, dim), written_out(name, x, dim)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    seed = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad(y, x, seed)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_products_up_to_each_have_a_gradient_at_any_size() -> None:
    """Torch's own derivative has a turn for each element, where it is traced."""

    class Products(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.cumprod(dim) for dim in range(3))

    specs = [TensorSpec("x", "float32", ("batch", "length", 6))]
    forward = capture_forward(Products(), {"x": torch.randn(2, 5, 6)}, specs)
    gradient = capture_gradient(forward).exported.module()
    for batch, length in ((1, 1), (4, 7), (3, 2)):
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, length, 6, generator=generator)
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.2, 0, x).requires_grad_()
        outputs = Products()(x)
        seeds = torch.randn(3, *x.shape, generator=generator).unbind()
        (wanted,) = torch.autograd.grad(outputs, x, seeds)
        torch.testing.assert_close(gradient(x.detach(), *seeds)["grad/x"], wanted)


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_of_as_many_as_are_selected_is_torchs(size: int, training: bool) -> None:
    x = torch.randn(size + 2 * training, 3, dtype=torch.float64, requires_grad=True)
    mean, deviation, weight, bias = torch.rand(4, 3, dtype=torch.float64) + 0.5
    calls = (F.batch_norm, BY_VALUES[F.batch_norm])
    wanted, found = (
        call(x, mean.clone(), deviation.clone(), weight, bias, training, eps=1e-3) for call in calls
    )
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in (found, wanted)))
    none = BY_VALUES[F.batch_norm](torch.randn(4, 3), None, None, training=True)
    torch.testing.assert_close(none.mean(0), torch.zeros(3))


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_a_batch_norm_of_halves_is_of_halves(wide: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3).bfloat16()
    given = (torch.rand(4, 3) + 0.5).to(wide)
    wanted, found = (call(x, *given) for call in (F.batch_norm, BY_VALUES[F.batch_norm]))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "logsumexp": lambda call, x: call(x, (0, 2)),
    "logsumexp of one": lambda call, x: call(x, 1, True),
    "roll": lambda call, x: call(x, (2, -1), (0, 2)),
    "roll of all": lambda call, x: call(x, 3),
    "cdist": lambda call, x: call(x, x[:, :2] + 1),
    "cdist of itself": lambda call, x: call(x, x),
    "cdist of sums": lambda call, x: call(x, x.detach() * 2, 1.0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [0, 1, 5])
def test_what_is_computed_of_values_is_torchs(name: str, size: int) -> None:
    function = getattr(torch, name.split()[0])
    x = torch.randn(size, 4, 3, dtype=torch.float64, requires_grad=True)
    wanted, found = CALLS[name](function, x), CALLS[name](BY_VALUES[function], x)
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(y, x, seed)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients, equal_nan=True)
