"""`x.squeeze()` where a dynamic size may be 1."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

HEAD = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
"""

# Where the model gives the same at size 1, or something else of other sizes, behind its squeezing.
SQUEEZED = {
    "all, and made whole again": (
        """
        total = x.logsumexp(-1, keepdim=True).squeeze()
        return x - total.view(*x.shape[:2], 1)
""",
        [],
    ),
    "a dimension, which goes at 1": ("        return x.tanh().squeeze(1)\n", ["length >= 2"]),
    "a dimension in vain": ("        return x.sin().squeeze(1).view(x.shape)\n", []),
    "Sinkhorn's marginals": (
        """
        cost = (x[:, :, None] - x[:, None]).square().sum(-1)
        even = torch.empty(x.shape[:2]).fill_(1.0 / x.shape[1]).squeeze()
        u = torch.zeros_like(even)
        for _ in range(3):
            scores = (u.unsqueeze(-1) - cost) / 0.1
            u = 0.1 * (even.log() - scores.logsumexp(-1)) + u
        return ((u.unsqueeze(-1) - cost) / 0.1).exp().sum((-2, -1))
""",
        ["length >= 2"],
    ),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_programs_say_where_a_squeezed_dimension_goes(
    name: str, tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    code, conditions = SQUEEZED[name]
    _, checkpoint, model = saved_net(HEAD + code)
    inputs, formats = parse_inputs(["x:[batch,length,4]"]), ["onnx", "exported_program"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=formats)
    assert bundle.manifest["programs"]["forward"].get("conditions", []) == conditions
    report = api.verify(
        bundle.folder, model=model, runtime=["eager", "exported_program", "onnxruntime"]
    )
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
