"""Code that goes round once for each doubling of a size: programs hold between powers of two."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify import held

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

# A prefix sum, of so many rounds as doublings of a step take to come to the length.
NET = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.places = nn.Embedding(40, 3)

    def summed(self, x):
        step = 1
        while step < x.shape[1]:
            x = x + F.pad(x[:, :-step], (0, 0, step, 0))
            step *= 2
        return x

    def turned(self, x):
        h = x[:, 0]
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(h) + x[:, t])
        return h

    def forward(self, x):
"""


def test_a_loop_beside_it_is_one(saved_net: SavedNet, tmp_path: Path) -> None:
    """Of which sizes are tried that are like the example's, and not only far from it."""
    module, checkpoint, code = saved_net(NET + "        return self.turned(self.summed(x))\n")
    inputs = parse_inputs(["x:[batch,length,3]"])
    options = {"model": code, "inputs": inputs}
    bundle = api.export(checkpoint, tmp_path / "b", format=["torchscript", "onnx"], **options)
    program = torch.jit.load(bundle.folder / "forward.pt")
    for length in (9, 12, 13, 16):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(program(x), module(x))
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def notes_of(saved_net: SavedNet, body: str, folder: Path, **sizes: int) -> list[str]:
    _, checkpoint, code = saved_net(NET + body)
    inputs = parse_inputs(["x:[batch,length,3]"])
    options = {"programs": "forward", "format": "torchscript", "sizes": sizes}
    return api.export(checkpoint, folder / "b", model=code, inputs=inputs, **options).manifest[
        "notes"
    ]


def test_a_note_says_how_to_have_more(saved_net: SavedNet, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    body = "        return self.summed(x)\n"
    found = notes_of(saved_net, body, tmp_path)
    assert any("8 <= length <= 16" in note for note in found)
    said = "forward: the model runs at larger sizes, too: export with --size length=17 for those"
    assert said in found
    found = notes_of(saved_net, body, tmp_path / "1", length=17)
    assert any("16 <= length <= 32" in note for note in found)


def test_no_note_promises_what_the_model_refuses(saved_net: SavedNet, tmp_path: Path) -> None:
    body = "        return x + self.places.weight[:x.shape[1]]\n"
    found = notes_of(saved_net, body, tmp_path)
    assert any("length <= 40" in note for note in found)
    assert not any("--size" in note for note in found)


def test_sizes_that_take_long_to_try_are_said(
    saved_net: SavedNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export of videos went on for ten minutes under the name of the step before."""
    _, checkpoint, code = saved_net(NET + "        return self.summed(x)\n")
    told: list[str] = []
    options = {"programs": "forward", "format": "torchscript", "progress": told.append}
    inputs = parse_inputs(["x:[batch,length,3]"])
    api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, **options)
    assert told.count("trying other sizes") == 1
    assert not any("--size" in line for line in told)
    monkeypatch.setattr(held, "_SLOW", 0.0)
    api.export(checkpoint, tmp_path / "c", model=code, inputs=inputs, **options)
    assert "that took 0 s at batch 2, length 17; --size makes the example smaller" in told


PAIRS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x):
        batch, height, width = x.shape
        pairs = self.a(x.reshape(batch, height, width // 2, 2))
        if width // 2 > 1:
            pairs = pairs.flip(2).flip(2)
        if height * (width // 2) > 1:
            pairs = pairs.flip(1).flip(1)
        return pairs
"""


def test_the_smallest_that_the_model_takes_are_tried_also_together(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    """Between these and the example's are sizes that it refuses."""
    _, checkpoint, code = saved_net(PAIRS)
    inputs = parse_inputs(["x:[batch,height,width]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="torchscript")
    found = bundle.manifest["programs"]["forward"]["conditions"]
    assert found == ["width is a multiple of 2"]
