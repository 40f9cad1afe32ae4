"""The baseline: ways to compute one and the same thing, each as good as the others."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from fuseport.exporter.verify import baseline


class Net(nn.Module):
    """Gives its input back, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_ways_of_the_baseline_move_everything_by_an_ulp(dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    inputs = {"x": torch.randn(100).to(dtype), "ids": torch.arange(3)}
    original = net.w.detach().clone()
    moved = 0
    for way in baseline.ways(net, inputs):
        with way as taken:
            difference = (taken["x"].double() - inputs["x"].double()).abs()
            assert bool((difference <= torch.finfo(dtype).eps * inputs["x"].double().abs()).all())
            assert torch.equal(taken["ids"], inputs["ids"])
            moved += bool(difference.any())
        assert torch.equal(net.w, original)
    assert moved == 3


def test_one_way_adds_one_value_after_the_other() -> None:
    """Equal values round alike at every step then, which is worse than any order of torch's."""
    x = torch.full((4099, 3), 0.1)
    exact = x.double().sum(0)
    off = []
    for way in baseline.ways(Net(), {"x": x}):
        with way:
            off.append(float((x.sum(0).double() - exact).abs().max() / exact.max()))
    *others, worst = sorted(off)
    assert worst == off[3]
    assert worst > 20 * max(others)


@pytest.mark.parametrize("dims", [None, (), 0, -1, (0, 2), (2, 0), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_in_order_are_sums(dims: int | tuple[int, ...] | None, keepdim: bool) -> None:
    tensors = torch.randn(5, 1, 7), torch.randn(7, 2, 3).mT, torch.randn(3, 0, 2)
    *_, way = itertools.islice(baseline.ways(Net(), {}), 4)
    with way:
        for x in tensors:
            torch.testing.assert_close(x.sum(dims, keepdim), x.double().sum(dims, keepdim).float())
            assert x.half().sum(dims, keepdim).dtype == torch.float16
            assert x.int().sum(dims, keepdim).dtype == torch.int64
            assert x.sum(dims, keepdim, dtype=torch.float64).dtype == torch.float64
        assert torch.ones(()).sum() == 1


def test_the_same_way_takes_means_and_backwards_of_norms_as_sums() -> None:
    """Torch's kernels give a constant cotangent's gradient, nothing but rounding, other errors."""
    torch.manual_seed(0)
    values = torch.full((1000, 2), 0.1)
    x, dy = torch.randn(6, 4, 9), torch.full((6, 4, 9), 0.1)
    layer, group = nn.LayerNorm(9), nn.GroupNorm(2, 4)

    def gradients(norm: nn.Module, dtype: torch.dtype) -> tuple[Tensor, ...]:
        wide = norm.to(dtype)
        given = x.to(dtype).requires_grad_()
        return torch.autograd.grad(wide(given), [given, *wide.parameters()], dy.to(dtype))

    plain = gradients(layer, torch.float32)
    *_, way = itertools.islice(baseline.ways(Net(), {}), 4)
    with way:
        assert not torch.equal(gradients(layer, torch.float32)[0], plain[0])
        for norm in (layer, group):
            for found, exact in zip(
                gradients(norm, torch.float32), gradients(norm, torch.float64), strict=True
            ):
                torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6)
        mean = values.mean(0)
        in_order = values.sum(0) / 1000
        assert torch.equal(mean, in_order)
        assert torch.equal(values.mean(0, keepdim=True), in_order[None])
        torch.testing.assert_close(values.mean(), torch.tensor(0.1), rtol=1e-4, atol=0)
    assert not torch.equal(values.mean(0), mean)


@pytest.mark.parametrize("wide", [True, False])
def test_what_a_wide_model_casts_to_half_is_moved_in_that(wide: bool) -> None:
    net = Net()
    inputs = {"x": torch.randn(100).to(torch.float32 if wide else torch.bfloat16)}
    x = torch.randn(100)
    cast = x.bfloat16()
    moved = 0
    for way in baseline.ways(net, inputs):
        with way:
            found = x.to(torch.bfloat16)
            assert torch.equal(x.double(), x.to(torch.float64))
        difference = (found.double() - cast.double()).abs()
        assert bool((difference <= torch.finfo(torch.bfloat16).eps * x.double().abs() * 1.01).all())
        moved += bool(difference.any())
    assert moved == (3 if wide else 0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_one_way_takes_the_kernel_of_a_batch_norm_that_rounds_more(
    training: bool, affine: bool
) -> None:
    """Of a half type, where the cotangent is not contiguous."""
    torch.manual_seed(0)
    x, dy = (torch.randn(3, 8, 30).bfloat16() for _ in range(2))
    weight, bias = (torch.rand(8), torch.rand(8)) if affine else (None, None)
    state = torch.zeros(8), torch.ones(8)
    norm, backward = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward
    _, *saved = norm(x, weight, bias, *state, training, 0.1, 1e-5)

    def gradients(dy: Tensor) -> list[Tensor]:
        mask = [True, affine, affine]
        found = backward(dy, x, weight, *state, *saved, training, 1e-5, mask)
        return [t for t in found if t is not None and t.numel()]

    other = gradients(dy.mT.contiguous().mT)
    *_, way = itertools.islice(baseline.ways(Net(), {}), 4)
    with way:
        found = gradients(dy)
    assert all(map(torch.equal, found, other))
    if affine:
        assert not torch.equal(found[2], gradients(dy)[2])


@pytest.mark.parametrize("name", sorted(baseline.ROUGH))
def test_one_way_takes_elementary_functions_as_rough_as_onnx_runtime_has_them(name: str) -> None:
    function = getattr(nn.functional, name, None) or getattr(torch, name)
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 1.5
    x = {"acos": x / 8, "asin": x / 8, "log": x.abs()}.get(name, x)
    exact = function(x.double())
    ulps = torch.from_numpy(np.spacing(exact.abs().float().numpy())).double()

    def roughness(found: Tensor) -> float:
        return float(((found.double() - exact) / ulps).square().mean().sqrt())

    (there,) = _session(name.capitalize()).run(None, {"x": x.numpy()})
    worst = roughness(torch.from_numpy(there))
    *others, other_kernels = [
        _called(function, x, way) for way in itertools.islice(baseline.ways(Net(), {"x": x}), 5)
    ]
    assert max(map(roughness, others)) < 0.75 * worst
    assert 0.8 * worst < roughness(other_kernels) < 1.6 * worst


def _called(function: Callable[[Tensor], Tensor], x: Tensor, way: AbstractContextManager) -> Tensor:
    with way:
        return function(x)


def _session(operator: str) -> onnxruntime.InferenceSession:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    node = helper.make_node(operator, ["x"], ["y"])
    graph = helper.make_graph([node], "function", values[:1], values[1:])
    opset = helper.make_opsetid("", 18)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("function", [torch.tanh, torch.sin, torch.sigmoid, torch.exp])
def test_what_no_library_gives_is_not_in_the_ways(function: Callable[[Tensor], Tensor]) -> None:
    """No step leads out of a function's range, nor over a zero, nor to NaN."""
    x = torch.tensor([-1e4, -100.0, -9.5, -1.5707964, -1e-45, 0.0, 1e-45, 1e-38, 1.5707964, 9.5])
    exact = function(x)
    for way in (way for _ in range(10) for way in baseline.ways(Net(), {"x": x})):
        found = _called(function, x, way)
        assert bool(found.isfinite().all())
        assert torch.equal(found.sign(), exact.sign())
        assert function is torch.exp or float(found.abs().max()) <= 1
