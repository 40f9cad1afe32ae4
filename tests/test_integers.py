"""Model code that makes numbers of sizes by `int` and `len`, taken for good."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from fuseport.exporter import api, models
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.errors import UsageError
from fuseport.exporter.models.user import parse_inputs

Saved = Callable[..., tuple[Path, str]]

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Conv2d(3, 4, 3, 2, 1)
        self.b = torch.nn.Linear(4, 4)

    def forward(self, x):
        H, W = x.shape[2:]
        assert isinstance(H, int) or not isinstance(H, float)
        H, W = int((H - 1) / 2) + 1, int((W - 1) / 2) + 1
        x = self.a(x).flatten(2).mT
        y = self.b(x) / int(W ** 0.5)
        {more}
        return y.mT.reshape(-1, 4, H, W)
"""
PLAIN = "assert int('7') == 7 and issubclass(bool, int) and isinstance(int(2.5), int)"
# Of this an array of numbers cannot be made where `int` is another.
TYPED = "y = y + torch.zeros(1, dtype=int)"


def exported(
    code: str, output: Path, saved_with: Saved, sizes: Mapping[str, int] | None
) -> tuple[Any, str]:
    torch.manual_seed(0)
    modules = {"a": torch.nn.Conv2d(3, 4, 3, 2, 1), "b": torch.nn.Linear(4, 4)}
    checkpoint, model = saved_with(code, **modules)
    inputs = parse_inputs(["x:[batch,3,height,width]"])
    return api.export(checkpoint, output, model=model, inputs=inputs, sizes=sizes), model


def test_sizes_stay_dynamic(tmp_path: Path, saved_with: Saved) -> None:
    code = NET.format(more=PLAIN)
    bundle, model = exported(code, tmp_path / "b", saved_with, {"height": 33, "width": 20})
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    again = models.rebuild(bundle.manifest["architecture"], bundle.weights, code=model)
    assert again.sizes == {"batch": 2, "height": 33, "width": 20}  # a failure is looked into there
    report = api.verify(tmp_path / "b", model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    found = {row.case for row in report.results if row.runtime == "onnxruntime"}
    wanted = {"export", "every dimension 1", "odd, transposed", "past a chunk, sliced"}
    assert found >= wanted


def test_code_that_takes_no_other_int_has_the_sizes_of_the_example(
    tmp_path: Path, saved_with: Saved
) -> None:
    code = NET.format(more=TYPED)
    bundle, _ = exported(code, tmp_path / "b", saved_with, {"height": 32, "width": 48})
    (height, *_) = bundle.manifest["programs"]["forward"]["conditions"]
    assert height == "31 <= height <= 32"
    line = code[: code.index("H, W = int")].count("\n") + 1
    (said,) = [note for note in bundle.manifest["notes"] if "took for granted" in note]
    assert f"net.py:{line}" in said


HALVED = """
def halved(x, size):
    return x.new_ones(int(size / 2), 3) * x.mean(1, keepdim=True)
"""
TWICE = """
import torch
from their_other import halved as of_other

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 4)

    def forward(self, x):
        y = halved(x, x.shape[1])
        return self.a(of_other(y, y.shape[1]))
"""


def test_each_of_several_modules_leaves_sizes_what_they_are(
    tmp_path: Path, saved_with: Saved
) -> None:
    """What the first has made a number of is a number to the second: mmcv's two convolutions."""
    checkpoint, model = saved_with(TWICE + HALVED, a=torch.nn.Linear(3, 4))
    (tmp_path / "their_other.py").write_text(HALVED)
    inputs = parse_inputs(["x:[batch,length,3]"])
    made = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        inputs=inputs,
        format="exported_program",
        programs="forward",
    )
    program = torch.export.load(made.folder / "forward.pt2").module()
    for length in (7, 20):
        assert program(torch.zeros(3, length, 3)).shape == (3, length // 4, 4)


def test_an_unknown_dimension_is_a_usage_error(tmp_path: Path, saved_with: Saved) -> None:
    code = NET.format(more="")
    with pytest.raises(
        UsageError, match=r"--size: no dynamic dimension depth; .*height \(16\), width \(24\)"
    ):
        exported(code, tmp_path / "b", saved_with, {"depth": 3})


def test_the_int_of_a_model_is_python_s_again(tmp_path: Path, saved_with: Saved) -> None:
    import sys

    code = NET.format(more="")
    exported(code, tmp_path / "b", saved_with, None)
    made = [
        m
        for m in list(sys.modules.values())
        if getattr(m, "__file__", None) == str(tmp_path / "net.py")
    ]
    assert made
    assert all("int" not in vars(module) for module in made)
    assert "quotient_of" not in torch.SymInt.__truediv__.__code__.co_names


ROUNDED = """
import math
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        length = x.shape[1]
        whole = math.ceil((length - 4) / 3) * 3 + 4
        x = torch.nn.functional.pad(x, (0, 0, 0, whole - length))
        kept = -(-length // 3) + int(math.ceil(length / 2 + 1)) - math.floor(length / 2 - 1) - 2
        kept = kept + round(length / 2) - round(length / 3) - math.ceil(0.25 * length)
        return self.a(x)[:, :kept] * ((1 - length) // 4) + round(length * 0.5 - 1)
"""


COUNTED = """
import torch

def many(parts):
    return len(parts)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        assert many([x, x]) == 2 and len("abc") == 3 and not len(torch.ones(0, 3))
        rows = x.flatten(0, 1)
        return self.a(rows).reshape(len(x), len(rows) // len(x), 8) / many(x.mT[0].mT)
"""


def test_the_length_of_a_tensor_stays_dynamic(tmp_path: Path, saved_with: Saved) -> None:
    checkpoint, model = saved_with(COUNTED, a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,length,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format="onnx")
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert {"odd, transposed", "past a chunk, sliced"} <= {row.case for row in report.results}


def assert_of_any_length(code: str, saved_with: Saved, folder: Path) -> Bundle:
    """Its artifacts give what it gives at other lengths, too."""
    checkpoint, model = saved_with(code, a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,length,8]"])
    bundle = api.export(checkpoint, folder / "b", model=model, inputs=inputs)
    runtimes = ["exported_program", "torchscript", "onnxruntime"]
    report = api.verify(bundle.folder, model=model, runtime=runtimes)
    assert report.exit_code() == 0, report.failures()
    assert {"odd, transposed", "past a chunk, sliced"} <= {row.case for row in report.results}
    return bundle


def test_quotients_of_sizes_are_rounded_as_python_does(tmp_path: Path, saved_with: Saved) -> None:
    """`math.ceil` has no form in a `.pt2`, and division of ONNX rounds towards zero."""
    assert_of_any_length(ROUNDED, saved_with, tmp_path)


PARTS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        length = x.shape[1]
        x = self.a(x) * (length * 0.1) + x * int(length ** 0.5)
        return x[:, : int(length * 0.29) + 1] + int(length / 0.7)
"""


def test_parts_of_sizes_are_of_as_many_digits_as_python_has(
    tmp_path: Path, saved_with: Saved
) -> None:
    """`int(100 * 0.29)` is 28; with the digits of float32 it is 29."""
    layer = torch.nn.Linear(8, 8)
    checkpoint, model = saved_with(PARTS, a=layer)
    api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[batch,length,8]", format="onnx")
    session = onnxruntime.InferenceSession(tmp_path / "b" / "forward.onnx")
    for length in (7, 49, 100, 200, 400):
        x = torch.randn(2, length, 8)
        expected = layer(x) * (length * 0.1) + x * int(length**0.5)
        expected = expected[:, : int(length * 0.29) + 1] + int(length / 0.7)
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected)
    report = api.verify(tmp_path / "b", model=model, runtime=["onnxruntime", "onnx_reference"])
    assert report.exit_code() == 0, report.failures()


PADS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(1, 4, 9, 4, padding=4)
        self.b = nn.ConvTranspose1d(4, 1, 9, 4, padding=4, output_padding=3)

    def forward(self, x):
        size = x.shape[-1]
        if size % 32:
            x = F.pad(x, (0, 32 - size % 32))
        return self.b(self.a(x).tanh())[..., :size]
"""


def test_what_comes_to_the_same_at_one_size_is_not_let_go_of(
    tmp_path: Path, saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]]
) -> None:
    """At 1, what is padded has no part in what is returned."""
    _, checkpoint, model = saved_net(PADS)
    inputs = parse_inputs(["x:[batch,1,samples]"])
    options: Any = {"model": model, "inputs": inputs, "format": "torchscript"}
    bundle = api.export(checkpoint, tmp_path / "b", sizes={"samples": 64}, **options)
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["samples is a multiple of 32"]
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code(strict=True) == 0, report.failures()
