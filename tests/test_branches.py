"""Branches over parts of dynamic sizes, of which torch does not know that they are more than 0."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

HALF = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = x[:, : x.shape[1] // 2] * 2
        if y.sum() > 0:
            y = torch.tanh(self.linear(y))
        return y.sum(1)
"""


def test_half_of_a_length_has_gradients_by_both_ways_in_every_format(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    _, checkpoint, model = saved_net(HALF)
    bundle = api.export(
        checkpoint,
        tmp_path / "bundle",
        model=model,
        inputs=parse_inputs(["x:[batch,length,4]"]),
        format=["torchscript", "exported_program", "onnx", "aot_inductor"],
    )
    assert "both ways are in the programs" in "; ".join(bundle.manifest["notes"])
    report = api.verify(
        bundle.folder,
        model=model,
        runtime=["torchscript", "exported_program", "onnxruntime", "aot_inductor"],
    )
    assert report.verdict == "pass", report.summary
