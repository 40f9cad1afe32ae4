"""Code that is another one for good once an input was small, as windows that Swin makes smaller."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.verify.sample import read_all

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.window, self.shift = 2, 1

    def forward(self, x):
        if min(x.shape[1:3]) <= self.window:
            self.window, self.shift = 1, 0
        return self.a(x).roll((self.shift, self.shift), (1, 2)) * x.mean((1, 2), keepdim=True)
"""

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]


@pytest.mark.parametrize("height", [5, 8])
def test_sizes_are_not_ruled_out_by_a_smaller_one(
    height: int, saved_net: SavedNet, tmp_path: Path
) -> None:
    """Be they higher than wide, where the example is not."""
    module, checkpoint, code = saved_net(NET)
    options = {"model": code, "inputs": "x:[batch,h,w,4]", "programs": "forward"}
    folder, sizes = tmp_path / "b", {"h": height, "w": 6}
    bundle = api.export(checkpoint, folder, format="torchscript", sizes=sizes, **options)
    (condition,) = bundle.manifest["programs"]["forward"]["conditions"]
    assert condition == "Min(h, w) >= 3"
    program = torch.jit.load(folder / "forward.pt")
    for batch, high, wide in ((2, 3, 9), (2, 9, 3), (1, 4, 4), (1, 3, 3)):
        x = torch.randn(batch, high, wide, 4)
        torch.testing.assert_close(program(x), module(x))


def test_what_is_tried_is_no_baseline(saved_net: SavedNet, tmp_path: Path) -> None:
    """What the model is after that would be as far off, and all within its bounds."""
    _, checkpoint, code = saved_net(NET)
    options = {"model": code, "inputs": "x:[batch,h,w,4]", "sizes": {"h": 5, "w": 6}}
    bundle = api.export(checkpoint, tmp_path / "b", format="torchscript", **options)
    for sample in read_all(bundle.folder / "samples"):
        for name, known in sample.expected.items():
            assert known.baseline.max_abs < 1e-5 * known.scale.max_abs, (sample.case.name, name)
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


LATER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.by = 1

    def forward(self, x):
        y = self.a(x) * self.by
        if x.shape[1] == 1:
            self.by = 2
        return y
"""


def test_what_a_case_keeps_is_no_other_case_s(saved_net: SavedNet, tmp_path: Path) -> None:
    """Artifacts keep nothing, and are held against a model that has kept nothing.

    Where it is another one at its second call, of inputs of one step, nothing can be held against.
    """
    _, checkpoint, code = saved_net(LATER)
    options = {"model": code, "inputs": "x:[batch,length,4]"}
    bundle = api.export(checkpoint, tmp_path / "b", format="torchscript", **options)
    report = api.verify(bundle.folder, model=code, runtime="torchscript")
    assert report.exit_code() == 0, report.failures()
    lost = {row.case for row in report.results if row.verdict != "pass"}
    samples = {sample.case.name: sample.case for sample in read_all(bundle.folder / "samples")}
    assert lost == {name for name, case in samples.items() if case.sizes["length"] == 1}
