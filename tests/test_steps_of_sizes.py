"""Loops of model code in steps of a size: `for start in range(0, length, length)`, one turn."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

# As Encodec goes over chunks of sound, which are all of it where there is no length of a chunk.
NET = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 4)

    def chunk(self, x):
        return self.up(x.cumsum(1).unsqueeze(-1)).tanh()

    def forward(self, x):
        length = x.shape[1]
        found = []
        for start in range(STEPS):
            found.append(self.chunk(x[:, start : start + size]) * (1 + len(found)))
        return torch.cat(found, 1)
"""
# The last of which is padded, and cut off behind, if there is anything to cut.
CUT = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 4)

    def forward(self, x):
        length = x.shape[1]
        whole = F.pad(x, (0, -length % 8)).unflatten(1, (-1, 8)).cumsum(2)
        y = self.up(whole.unsqueeze(-1)).flatten(1, 2)
        y = y if length >= 17 else y * 2
        return y[:, :length] if length < y.shape[1] else y
"""


@pytest.mark.parametrize(
    ("steps", "size", "conditions"),
    [
        ("0, length, length", "length", None),
        ("length - 1, -1, -length", "length", None),
        ("0, length, length // 2", "length // 2", ["length is a multiple of 2"]),
    ],
)
def test_there_are_as_many_as_sizes_say(
    steps: str, size: str, conditions: list[str] | None, saved_net: SavedNet, tmp_path: Path
) -> None:
    code = NET.replace("STEPS", steps).replace("+ size", f"+ {size}")
    _, checkpoint, name = saved_net(code)
    bundle = api.export(
        checkpoint, tmp_path / "b", model=name, inputs=parse_inputs(["x:[b,length]"])
    )
    assert bundle.manifest["programs"]["forward"].get("conditions") == conditions
    report = api.verify(bundle.folder, model=name, runtime=["eager", "onnxruntime", "torchscript"])
    assert report.exit_code(strict=True) == 0, report.failures()


def test_a_condition_that_holds_again_is_let_go_of(saved_net: SavedNet, tmp_path: Path) -> None:
    """At the next multiple: at those below the example's sizes something else does not hold, too,
    and far beyond them models are too large to be tried."""
    module, checkpoint, name = saved_net(CUT)
    inputs = parse_inputs(["x:[b,length]"])
    options = {"format": ["torchscript"], "sizes": {"length": 20}}
    bundle = api.export(checkpoint, tmp_path / "b", model=name, inputs=inputs, **options)
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["length >= 17"]
    program = torch.jit.load(bundle.folder / "forward.pt")
    for length in (17, 24, 31, 32, 64):
        x = torch.randn(2, length)
        torch.testing.assert_close(program(x), module(x))
