"""Models whose form torch's programs do not take: compiled, caching, or of names that are taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.models import user
from fuseport.exporter.models._capturable import capturable

COMPILED = """
import torch
from torch import nn

@torch.compile
def squashed(x):
    return torch.tanh(x)

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.one = torch.compile(nn.Linear(3, width))
        self.again = self.one
        self.two = nn.Sequential(nn.Linear(width, width), torch.compile(nn.Tanh()))
    def forward(self, x):
        return self.two(self.one(x)) + squashed(self.again(x))

def compiled():
    return torch.compile(Net())
"""
NAMED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.meta = nn.Linear(3, 4)
        self.code = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 2)
        self.example_input_array = (torch.randn(2, 3), torch.randn(2, 4))
    def forward(self, image, beside=None):
        y = self.meta(image) * self.code
        return self.out(y if beside is None else y + beside)
"""


@pytest.mark.parametrize("name", ["Net", "compiled"])
def test_compiled_parts_are_what_they_compile(
    name: str, saved_with: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    """Of a file with torch.compile's names, and of one without."""
    one, inside = torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)
    layers = {"one._orig_mod" if name == "Net" else "one": one, "two.0": inside}
    checkpoint, code = saved_with(COMPILED, **layers)
    model = code.replace(":Net", f":{name}")
    inputs = user.parse_inputs(["x:[batch,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format="onnx")
    names = {spec["name"] for spec in bundle.manifest["programs"]["gradient"]["outputs"]}
    assert {n for n in names if n.startswith("grad/")} == {
        "grad/x", "grad/one.weight", "grad/one.bias", "grad/two.0.weight", "grad/two.0.bias",
    }  # fmt: skip
    report = api.verify(bundle.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()


CACHING = """
import functools
import torch
from torch import nn

@functools.lru_cache
def angles(n):
    return torch.arange(n).float()[:, None] / torch.arange(1, 5)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)
    @functools.cache
    def bias(self, n):
        return torch.linspace(0, 1, n)[:, None]
    def forward(self, x):
        return self.out(x + angles(x.shape[1]).sin()) + self.bias(x.shape[1])
"""


def test_caches_keep_no_dynamic_size(
    saved_with: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    checkpoint, code = saved_with(CACHING, out=torch.nn.Linear(4, 2))
    inputs = user.parse_inputs(["x:[batch,length,4]"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, format="onnx", programs="forward"
    )
    report = api.verify(bundle.folder, model=code, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()


def test_names_that_programs_have_taken_are_inside(
    saved_with: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    checkpoint, code = saved_with(NAMED, meta=torch.nn.Linear(3, 4), out=torch.nn.Linear(4, 2))
    state: dict[str, Any] = torch.load(checkpoint)
    torch.save({**state, "code": torch.randn(4)}, checkpoint)
    bundle = api.export(checkpoint, tmp_path / "b", model=code)
    notes = bundle.manifest["notes"]
    assert any("have code and meta for themselves" in note for note in notes)
    inputs = bundle.manifest["programs"]["forward"]["inputs"]
    assert [spec["name"] for spec in inputs] == ["image", "beside"]
    runtimes = ["eager", "exported_program", "torchscript", "onnxruntime"]
    report = api.verify(bundle.folder, model=code, runtime=runtimes)
    assert report.exit_code(strict=True) == 0, report.failures()
    tensors = {row.tensor for row in report.results if row.runtime == "onnxruntime"}
    assert {"grad/net.meta.weight", "grad/net.code", "grad/beside"} <= tensors


def test_other_models_stay_as_they_are() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    assert capturable(net) == (net, ())
    deeper = torch.nn.Module()
    deeper.net = torch.nn.ModuleDict({"graph": torch.nn.Linear(2, 2)})
    assert capturable(deeper) == (deeper, ())
