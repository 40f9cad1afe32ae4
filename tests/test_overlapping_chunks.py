"""Longformer's chunks, which overlap, as views by strides of heads side by side in memory."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x, mask):
        padding = (4 - x.shape[1] % 4) % 4
        if padding > 0:
            x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        batch, length, _ = x.shape
        large = (mask > 1).any().item()
        heads = self.linear(x.transpose(0, 1)).view(length, batch, 2, 3).transpose(0, 1)
        heads = heads.transpose(1, 2).reshape(2 * batch, length, 3)
        count = torch.div(length, 4, rounding_mode="trunc")
        chunks = heads.view(2 * batch, count, 4, 3)
        size, stride = list(chunks.shape), list(chunks.stride())
        size[1] = torch.div(length, 2, rounding_mode="trunc") - 1
        stride[1] = stride[1] // 2
        chunks = chunks.as_strided(size, stride).sin().reshape(batch, 2, -1, 12)
        if large:
            most = int((mask > 1).sum(1).max())
            chunks = chunks[:, :, : 2 * most] * most
        return chunks
"""


def test_chunks_that_overlap_have_gradients_at_any_number_of_them(
    tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    _, checkpoint, model = saved_net(CODE)
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        inputs=parse_inputs(["x:[batch,length,6]", "mask:int64[batch,length]<2"]),
    )
    (decision,) = (note for note in bundle.manifest["notes"] if "decides by a value" in note)
    assert "the way of False is in the programs, artifacts fail where" in decision
    conditions = bundle.manifest["programs"]["forward"]["conditions"]
    assert conditions == ["length is a multiple of 4"]
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
