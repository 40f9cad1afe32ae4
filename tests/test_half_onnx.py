"""Half types in ONNX: what its operators lack of them, and what torch.onnx makes float32."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = NORM

    def forward(self, x):
        return self.norm(self.conv(x)).sin()
"""
NORMS: dict[str, nn.Module] = {
    "nn.GroupNorm(4, 8, affine=False)": nn.GroupNorm(4, 8, affine=False),
    "nn.InstanceNorm1d(8, affine=True)": nn.InstanceNorm1d(8, affine=True),
    "nn.BatchNorm1d(8)": nn.BatchNorm1d(8),
    "nn.LayerNorm(16, elementwise_affine=False)": nn.LayerNorm(16, elementwise_affine=False),
}
OF_BFLOAT16 = {"eager", "onnx_reference"}  # ONNX Runtime has hardly a kernel of it on the CPU


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", NORMS)
def test_convolutions_and_norms_hold_in_onnx(
    norm: str, dtype: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    layers = {"conv": nn.Conv1d(8, 8, 3), "norm": NORMS[norm]}
    checkpoint, model = saved_with(NET.replace("NORM", norm), **layers)
    inputs = parse_inputs(["x:[batch,8,16]"])
    options = {"model": model, "inputs": inputs, "dtype": dtype, "format": ["onnx"]}
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    said = "forward.onnx, gradient.onnx: ONNX Runtime has no products in bfloat16 on the CPU"
    assert any(said in note for note in bundle.manifest["notes"]) == (dtype == "bfloat16")
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    passed = {row.runtime for row in report.results if row.verdict == "pass"}
    assert passed >= (OF_BFLOAT16 if dtype == "bfloat16" else {*OF_BFLOAT16, "onnxruntime"})
    graph = onnx.load(bundle.folder / "forward.onnx").graph
    assert {node.op_type for node in graph.node} >= {"Conv", "Sin"}


@pytest.mark.parametrize("opset", [18, 22])
def test_bfloat16_is_widened_where_an_operator_lacks_it(
    opset: int, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """From opset 22 on Conv and Sin have it."""
    checkpoint, model = saved_with(NET.replace("NORM", "nn.Identity()"), conv=nn.Conv1d(8, 8, 3))
    inputs = parse_inputs(["x:[batch,8,16]"])
    options = {"model": model, "inputs": inputs, "dtype": "bfloat16", "format": ["onnx"]}
    bundle = api.export(checkpoint, tmp_path / "b", **options, opset=opset)
    nodes = onnx.load(bundle.folder / "forward.onnx").graph.node
    casts = [node for node in nodes if node.op_type == "Cast"]
    assert bool(casts) == (opset < 22)


def test_what_autocast_leaves_in_bfloat16_is_named_where_no_kernel_is(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """`Gelu` has a body, of which ONNX Runtime names no node."""
    code = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.gelu(self.a(x)).float()
"""
    checkpoint, model = saved_with(code, a=nn.Linear(4, 4))
    inputs = parse_inputs(["x:[batch,4]"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=inputs, format="onnx", programs="forward"
    )
    report = api.verify(bundle.folder, runtime="onnxruntime")
    for row in report.results:
        assert row.verdict == "unsupported"
        assert "bfloat16" in str(row.reason)
        assert "without autocast" in str(row.reason)
