"""Operators that fuseport gives onnx's reference evaluator in place of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from fuseport.exporter import api, runtimes

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

KINDS = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
}


def ran(kind: str, tensors: dict[str, Tensor], file: Path, **attributes: Any) -> Tensor:
    """What one operator gives."""
    given = [helper.make_tensor_value_info(n, KINDS[t.dtype], t.shape) for n, t in tensors.items()]
    node = helper.make_node(kind, list(tensors), ["y"], **attributes)
    y = helper.make_tensor_value_info("y", given[0].type.tensor_type.elem_type, None)
    model = helper.make_model(
        helper.make_graph([node], "g", given, [y]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(model, file)
    return runtimes.get("onnx_reference").load(file, {}).run(tensors)["y"]


@pytest.mark.parametrize("axis", [1, -1, 0])
def test_gathers_from_a_long_axis_with_few_indices(axis: int, tmp_path: Path) -> None:
    """onnx's own code chooses among 64 arrays at most, and wants indices of the data's size."""
    x, i = torch.randn(70, 100), torch.randint(-70, 70, (3, 5))
    found = ran("GatherElements", {"x": x, "i": i}, tmp_path / "m.onnx", axis=axis)
    expected = torch.gather(x, axis, torch.where(i < 0, i + x.shape[axis], i))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("axes", [None, [0, -1]])
def test_takes_away_where_a_pad_is_negative(axes: list[int] | None, tmp_path: Path) -> None:
    """The gradient of a pad is one; onnx's own code leaves that to numpy, which refuses it."""
    pads = torch.tensor([2, -1, -1, -2] if axes else [2, 1, -1, -1, 0, -2])
    tensors = {"x": torch.randn(3, 4, 7), "pads": pads, "value": torch.tensor(0.5)}
    if axes:
        tensors["axes"] = torch.tensor(axes)
    found = ran("Pad", tensors, tmp_path / "m.onnx")
    middle = (0, 0) if axes else (1, 0)
    expected = torch.nn.functional.pad(tensors["x"], (-1, -2, *middle, 2, -1), value=0.5)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_are_torch_s(dims: int, groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2, "groups": groups}
    x, bias = torch.randn(2, 4, *(4 + i for i in range(dims))), torch.randn(3 * groups)
    weight = torch.randn(4, 3, *(2 + i for i in range(dims)))
    found = ran(
        "ConvTranspose",
        {"x": x, "weight": weight, "bias": bias},
        tmp_path / "m.onnx",
        strides=[3] * dims,
        pads=[1] * 2 * dims,
        output_padding=[2] * dims,
        dilations=[2] * dims,
        group=groups,
    )
    exact = getattr(torch.nn.functional, f"conv_transpose{dims}d")(
        x.double(), weight.double(), bias.double(), **options
    )
    assert torch.equal(found, exact.float())


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_grids_are_sampled_as_by_torch(
    mode: str, padding: str, align: bool, dims: int, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(56)
    x = torch.randn(2, 3, *(5, 1, 4)[:dims], generator=draw)
    grid = torch.randn(2, *(3, 7, 2)[:dims], dims, generator=draw)
    grid[0, 0, 0] = 9.0
    given = {"padding_mode": padding, "align_corners": int(align)}
    found = ran("GridSample", {"x": x, "grid": grid}, tmp_path / "m.onnx", mode=mode, **given)
    expected = torch.nn.functional.grid_sample(
        x, grid, "bilinear" if mode == "linear" else mode, padding, align
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_no_places_of_a_grid_are_of_the_shape_that_they_have(mode: str, tmp_path: Path) -> None:
    """onnx's own code returns no tuple there, and fails by that."""
    tensors = {"x": torch.randn(2, 3, 4, 5), "grid": torch.randn(2, 0, 6, 2)}
    found = ran("GridSample", tensors, tmp_path / "m.onnx", mode=mode)
    assert found.shape == (2, 3, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "Einsum", "ReduceSum", "CumSum"])
def test_long_sums_are_rounded_once(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """numpy's are six times less exact than torch's over 4,225 rows, and more in half precision."""
    torch.manual_seed(0)
    x, other = torch.randn(4225, 8).to(dtype), torch.randn(4225, 4).to(dtype)
    attributes: dict[str, Any] = {}
    if kind == "ReduceSum":
        tensors, exact = {"x": x, "axes": torch.tensor([0])}, x.double().sum(0, keepdim=True)
    elif kind == "CumSum":
        tensors, exact = {"x": x, "axis": torch.tensor(0)}, x.double().cumsum(0)
    else:
        tensors, exact = {"x": x, "other": other}, x.double().t() @ other.double()
        if kind == "MatMul":
            tensors["x"] = x.t().contiguous()
        elif kind == "Gemm":
            attributes["transA"] = 1
        else:
            attributes["equation"] = "ka,kb->ab"
    found = ran(kind, tensors, tmp_path / "m.onnx", **attributes)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-10)


def test_a_function_of_types_runs_in_the_body_of_another(tmp_path: Path) -> None:
    """onnx's own code refuses `Gelu` where it knows the type of no value, as in a body."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    body = helper.make_node("Gelu", ["x"], ["y"], approximate="tanh")
    function = helper.make_function("own", "gate", ["x"], ["y"], [body], opsets[:1])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    node = helper.make_node("gate", ["x"], ["y"], domain="own")
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    x = torch.randn(3, 5)
    found = runtimes.get("onnx_reference").load(tmp_path / "m.onnx", {}).run({"x": x})["y"]
    torch.testing.assert_close(found, torch.nn.functional.gelu(x, approximate="tanh"))


REPEATED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, counts):
        rows = torch.repeat_interleave(counts)
        return self.a(x)[rows], x.repeat_interleave(counts, 0)
"""

SUMMED_IN_LOGARITHMS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).logcumsumexp(1)
"""


def test_takes_what_is_repeated_as_often_as_values_say(saved_net: SavedNet, tmp_path: Path) -> None:
    """onnxscript's form of it sums along a vector of one axis, which onnx refuses."""
    _, checkpoint, code = saved_net(REPEATED)
    inputs = ["x:[rows,4]", "counts:int64[rows]<5"]
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="onnx")
    report = api.verify(bundle.folder, model=code, runtime=["onnxruntime", "onnx_reference"])
    assert report.exit_code(strict=True) == 0, report.failures()


def test_sums_exponentials_so_far(saved_net: SavedNet, tmp_path: Path) -> None:
    """onnxscript's form of it, too, sums along a vector of one axis, made otherwise."""
    _, checkpoint, code = saved_net(SUMMED_IN_LOGARITHMS)
    inputs = ["x:[batch,length,4]"]
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="onnx")
    report = api.verify(bundle.folder, model=code, runtime=["onnxruntime", "onnx_reference"])
    assert report.exit_code(strict=True) == 0, report.failures()
