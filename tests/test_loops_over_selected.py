"""Loops over a dynamic size that write and read as many as values select, as BEVFormer has them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

# Queries that a camera sees, padded to as many as another one sees at most, and brought back.
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x, mask):
        seen = [each.nonzero().squeeze(-1) for each in mask]
        most = max([len(each) for each in seen])
        padded = x.new_zeros([x.shape[0], 2, most, 3])
        for j in range(x.shape[0]):
            for i, each in enumerate(seen):
                padded[j, i, :len(each)] = x[j, each]
        y, out = torch.tanh(self.a(padded)), torch.zeros_like(x)
        for j in range(x.shape[0]):
            for i, each in enumerate(seen):
                out[j, each] += y[j, i, :len(each)]
        return out
"""


def test_parts_that_values_say_have_gradients_and_every_turn_is_alike(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    """Of `out`, the first turn is given something that none has written to."""
    module, checkpoint, code = saved_net(CODE)
    inputs = parse_inputs(["x:[batch,n,3]", "mask:int64[2,n]<2"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs,
        format=["torchscript", "onnx"],
    )  # fmt: skip
    assert not any("conditions" in each for each in bundle.manifest["programs"].values())
    program = torch.jit.load(bundle.folder / "forward.pt")
    draw = torch.Generator().manual_seed(56)
    with torch.no_grad():
        for batch, n, share in (1, 9, 0.3), (3, 31, 0.1), (2, 1, 1.0), (1, 5, 0.0):
            x = torch.randn(batch, n, 3, generator=draw)
            mask = (torch.rand(2, n, generator=draw) < share).long()
            torch.testing.assert_close(program(x, mask), module(x, mask))
    report = api.verify(bundle.folder, model=code, runtime=["torchscript", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
