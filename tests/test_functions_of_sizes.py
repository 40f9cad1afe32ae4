"""Model code that computes numbers of dynamic sizes by functions of Python's and numpy's."""

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.tests.test_integers import Saved, assert_of_any_length

HEAD = """
import math
import numpy as np
import torch
from math import cos, hypot, isqrt, sqrt

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        length = x.shape[1]
"""


FLOATS = """\
        assert isinstance(0.5, float) and not isinstance(1, float) and float("7") == 7.0
        padded = 32 * (length // 32 + 1)
        y = self.a(x) * (float(length) / float(padded)) / math.sqrt(length)
        scores = x @ x.mT / math.sqrt(float(length) + 0.5)
        return y + torch.softmax(scores, -1) @ x * math.sqrt(4) + math.isqrt(length)
"""

FUNCTIONS = """\
        assert math.log(8, 2) == 3 and sqrt(4) == 2 and hypot(3, 4) == 5 and math.cos(0) == 1
        by = math.log(length + 1, 512) / sqrt(length) + hypot(length, x.shape[2]) - isqrt(length)
        y = self.a(x) * by + np.log(length + 0.5) - np.sqrt(length) * np.arctan(length)
        bits = math.log2(length)
        scores = (x @ y.mT) * (1 - bits / 3) * bits * math.exp(-0.01 * length)
        scores = scores * (2 - float(bits)) * cos(math.pi / length) + abs(-bits)
        return torch.softmax(scores, -1) @ x + round(bits) - bits * bits + 3 ** bits
"""


EXTREMES = """\
        assert max([], default=3) == 3 and min({4: 1}) == 4 and max(2, 5, key=lambda n: -n) == 2
        side, least = max(x.shape), min(n + 2 for n in x.shape[:2])
        by = max(length, x.shape[0], 3) - min([length, 2 * x.shape[0], 5]) + max(0.5, 7.5)
        return self.a(x) * by / side, torch.arange(side + min(length, 4, 9)) - least
"""


@pytest.mark.parametrize("code", [FLOATS, FUNCTIONS, EXTREMES])
def test_functions_of_sizes_stay_dynamic(code: str, tmp_path: Path, saved_with: Saved) -> None:
    """Flow networks scale what they resized so, and attention its scores by a length."""
    bundle = assert_of_any_length(HEAD + code, saved_with, tmp_path)
    assert "conditions" not in bundle.manifest["programs"]["forward"]


ROUNDED = """\
        counts = [math.floor(length * 0.29), math.ceil(length * 0.35), round(length * 0.7)]
        counts += [round(length * 1.5), math.floor(2.5 - length * 0.7), math.ceil(2.5 - length)]
        counts += [round(2.5 - 0.6 * length), int(np.ceil(length * 0.58)), int(length * 0.8 // 1.5)]
        y = self.a(x)[:, : math.ceil(length * 0.7)]
        return y, torch.stack([x.new_full((), count) for count in counts]) + x.sum()
"""


def test_what_is_rounded_of_sizes_is_what_python_has(
    tmp_path: Path, saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]]
) -> None:
    """Of 29 hundredths of 100 it has 28; and 0.7 of 10 is 7, and no more."""
    net, checkpoint, code = saved_net(HEAD + ROUNDED)
    inputs, folder = "x:[batch,length,8]", tmp_path / "b"
    api.export(checkpoint, folder, model=code, inputs=inputs, programs="forward")
    script = torch.jit.load(str(folder / "forward.pt"))
    program = torch.export.load(folder / "forward.pt2").module()
    session = onnxruntime.InferenceSession(folder / "forward.onnx")
    for length in (*range(1, 42), 100, 170, 200, 450):
        x = torch.zeros(1, length, 8)
        expected = [y.detach() for y in net(x)]
        in_onnx = [torch.from_numpy(y) for y in session.run(None, {"x": x.numpy()})]
        results = {"script": [*script(x).values()], "program": [*program(x).values()]}
        for name, found in {**results, "onnx": in_onnx}.items():
            said = f"{name}, length {length}"
            torch.testing.assert_close(found, expected, msg=lambda m, s=said: f"{s}: {m}")


def test_what_a_pt2_has_no_form_of_is_named(tmp_path: Path, saved_with: Saved) -> None:
    code = HEAD + ROUNDED.replace("round(length * 0.7)", "round(length * 0.7, 1)")
    checkpoint, model = saved_with(code, a=torch.nn.Linear(8, 8))
    with pytest.raises(ExportFailed, match=r"torch has no form of builtins\.round of a size"):
        api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[batch,length,8]")


ASKED = """\
        def table(rows):
            if isinstance(rows, int):
                rows = torch.arange(rows)
            return torch.outer(rows, torch.ones(8))

        half = length / 2
        assert isinstance(half, float) and not isinstance(half, int | torch.Tensor)
        return self.a(x) + table(length) * half
"""


def test_a_size_is_a_number_where_code_asks_what_it_is(tmp_path: Path, saved_with: Saved) -> None:
    """As diffusers' `get_1d_rotary_pos_embed`, which takes a count or the positions."""
    assert_of_any_length(HEAD + ASKED, saved_with, tmp_path)
    checkpoint, model = saved_with(HEAD + ASKED, a=torch.nn.Linear(8, 8))
    given = {"x": torch.randn(2, 5, 8)}
    found = api.export(checkpoint, tmp_path / "c", model=model, given=given, programs="forward")
    (spec,) = found.manifest["programs"]["forward"]["inputs"]
    assert spec["dims"] == ["batch", "x_1", 8]
