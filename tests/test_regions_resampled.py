"""Branches and loops that sample by a grid, whose derivative and form in ONNX are others there."""

from collections.abc import Callable, Iterable
from pathlib import Path

import onnx
import pytest
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 2, 1)

    def sampled(self, x):
        grid = torch.tanh(self.a(x)).permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=True)

    def forward(self, x):
"""

BODIES = {
    "a branch": """
        return self.sampled(x) if x.mean() > 0 else x * 2
""",
    "a loop": """
        ys = []
        for t in range(x.shape[2]):
            place = torch.arange(x.shape[3]) / x.shape[3]
            ys.append(self.sampled(x[:, :, t, None] * place)[:, :, 0])
        return torch.stack(ys, 2)
""",
}


@pytest.mark.parametrize("name", BODIES)
def test_regions_that_resample_have_gradients(
    name: str, saved_net: SavedNet, tmp_path: Path
) -> None:
    _, checkpoint, code = saved_net(HEAD + BODIES[name])
    inputs = parse_inputs(["x:[batch,3,h,w]"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, format=["torchscript", "onnx"]
    )
    report = api.verify(bundle.folder, model=code, runtime=["torchscript", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
    nodes = onnx.load(bundle.folder / "forward.onnx").graph.node
    assert _modes(nodes) == {b"linear"}  # of opset 20; a checker takes any other


def _modes(nodes: Iterable[onnx.NodeProto]) -> set[bytes]:
    found: set[bytes] = set()
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found |= _modes(attribute.g.node)
            elif node.op_type == "GridSample" and attribute.name == "mode":
                found.add(attribute.s)
    return found
