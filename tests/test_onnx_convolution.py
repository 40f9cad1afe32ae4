"""The gradient of a filter's weight in ONNX's operators: right, and small for large filters."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseport.exporter import formats
from fuseport.exporter.formats._onnx.decompositions import decompositions
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import get

aten = torch.ops.aten
FORMULA = decompositions(
    torch.export.export(torch.nn.Identity(), (torch.ones(1),))
)[aten.convolution_backward.default]  # fmt: skip


def backward(
    rank: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    transposed: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What the formula gives, and what torch's own backward does: of input, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 8 // groups) if transposed else (8, 4 // groups)
    x = torch.randn(2, 4, *(9 + i for i in range(rank)), generator=generator).double()
    weight = torch.randn(*shape, *kernel, generator=generator).double()
    rest = (stride, padding, [1] * rank, transposed, [0] * rank, groups)
    y = aten.convolution.default(x, weight, None, *rest)
    cotangent = torch.randn(y.shape, generator=generator).double()
    arguments = (cotangent, x, weight, [8], *rest, [True, True, True])
    return FORMULA(*arguments), aten.convolution_backward.default(*arguments)


KERNELS = [(1, 1), (3, 3), (4, 4), (2, 5)]
STRIDES = [(1, 1), (2, 2), (3, 1), (4, 4), (1, 6)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
def test_gradients_are_torchs_at_every_stride(
    padding: tuple[int, int], groups: int, transposed: bool
) -> None:
    for kernel, stride in itertools.product(KERNELS, STRIDES):
        got, wanted = backward(2, kernel, stride, padding, groups, transposed)
        torch.testing.assert_close(got, wanted, msg=lambda m: f"{kernel} {stride}: {m}")  # noqa: B023


@pytest.mark.parametrize("rank", [1, 3])
def test_gradients_are_torchs_in_other_ranks(rank: int) -> None:
    kernel, stride = [3, 2, 4][:rank], [2, 1, 3][:rank]
    got, wanted = backward(rank, kernel, stride, [1] * rank, 2, False)
    torch.testing.assert_close(got, wanted)


def test_patches_of_any_size_take_a_handful_of_operators() -> None:
    """Vision Mamba's and VMamba's: a tap at a time, 16×16 took 256 products and minutes."""

    def operators(kernel: int, stride: int) -> int:
        x, weight = torch.ones(1, 3, 32, 32), torch.ones(4, 3, kernel, kernel)
        y = torch.nn.functional.conv2d(x, weight, stride=stride)
        rest = ((stride, stride), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
        graph = torch.fx.experimental.proxy_tensor.make_fx(
            lambda cotangent: FORMULA(cotangent, x, weight, None, *rest)[1]
        )(torch.ones_like(y)).graph
        return sum(node.op == "call_function" for node in graph.nodes)

    assert operators(16, 16) == operators(4, 4) < 30
    assert operators(16, 8) < 90


@pytest.mark.parametrize("groups", [1, 4])
def test_a_filters_gradient_is_one_convolution(groups: int) -> None:
    """A tap at a time, a network of sixty filters took ONNX Runtime minutes to load."""
    rest = ((1, 1), (1, 1), (1, 1), False, (0, 0), groups, (True, True, False))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *args: FORMULA(*args, None, *rest))(
        torch.ones(2, 8, 9, 9), torch.ones(2, 4, 9, 9), torch.ones(8, 4 // groups, 3, 3)
    ).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert len([n for n in calls if n.target is aten.convolution.default]) == 2
    assert len(calls) < 16


def test_gradients_of_groups_are_right_in_onnxs_evaluator(tmp_path: Path) -> None:
    """Its ConvTranspose takes the wrong channels where a group has several: VMamba's have."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, (1, 3), padding=(0, 1), groups=2),
        torch.nn.Conv2d(6, 4, 3, stride=2, groups=2),
    ).eval()
    spec = TensorSpec("x", "float32", ("batch", 4, 6, "width"))
    gradient = capture_gradient(capture_forward(module, {"x": torch.randn(2, 4, 6, 6)}, [spec]))
    file = tmp_path / "gradient.onnx"
    formats.get("onnx").write(gradient, file, formats.Options(tmp_path / "w"))
    session = get("onnx_reference").load(file, {})
    for width in (6, 7):
        x = torch.randn(1, 4, 6, width, requires_grad=True)
        y = module(x)
        dy = torch.randn(y.shape)
        found = session.run({"x": x.detach(), f"cotangent_{gradient.outputs[0].name}": dy})
        wanted = torch.autograd.grad(y, [x, *module.parameters()], dy)
        names = ["x", *(name for name, _ in module.named_parameters())]
        for name, value in zip(names, wanted, strict=True):
            torch.testing.assert_close(found[f"grad/{name}"], value)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_pointwise_filters_are_torchs(rank: int, transposed: bool) -> None:
    one, none = [1] * rank, [0] * rank
    for groups in (1, 4):
        got, wanted = backward(rank, one, one, none, groups, transposed)
        torch.testing.assert_close(got, wanted)


def test_pointwise_filters_over_large_volumes_are_as_exact_as_torchs(tmp_path: Path) -> None:
    """ONNX Runtime adds up a volume's convolution of one output position one by one."""
    torch.manual_seed(0)
    module = torch.nn.Conv3d(12, 2, 1).eval()
    x, dy = torch.rand(2, 12, 40, 40, 40), torch.ones(2, 2, 40, 40, 40)
    spec = TensorSpec("x", "float32", tuple(x.shape))
    gradient = capture_gradient(capture_forward(module, {"x": x}, [spec]))
    file = tmp_path / "gradient.onnx"
    formats.get("onnx").write(gradient, file, formats.Options(tmp_path / "w"))
    session = get("onnxruntime").load(file, {})
    found = session.run({"x": x, f"cotangent_{gradient.outputs[0].name}": dy})["grad/weight"]
    (own,) = torch.autograd.grad(module(x), module.weight, dy)
    (exact,) = torch.autograd.grad(module.double()(x.double()), module.weight, dy.double())
    assert found is not None
    assert (found - exact).abs().max() < 4 * (own - exact).abs().max()


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_padding_that_is_a_word_is_one_number(groups: int, kernel: tuple[int, int]) -> None:
    """As of SigLIP's patches, `padding="valid"`: torch has one number for all axes then."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    weight = torch.randn(8, 4 // groups, *kernel, dtype=torch.float64)
    for stride, dilation in (([1, 1], [1]), ([2], [1, 1]), ([2, 3], [1])):
        rest = (stride, [0], dilation, False, [0, 0], groups)
        y = aten.convolution.default(x, weight, None, *rest)
        given = (torch.randn_like(y), x, weight, [8], *rest, [True, True, True])
        torch.testing.assert_close(FORMULA(*given), aten.convolution_backward.default(*given))
