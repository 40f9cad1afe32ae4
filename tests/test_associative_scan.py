"""Torch's `associative_scan`, and `vmap` in loops: of any length."""

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.by_autograd import assert_same

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

CODE = """
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

def recurrence(one, next_one):
    return one[0] * next_one[0], next_one[0] * one[1] + next_one[1]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        decay, given = torch.sigmoid(self.a(x)), torch.tanh(x)
"""

FORMS = {
    "of pairs": """
        return associative_scan(recurrence, (decay, given), 1, combine_mode="generic")[1]
""",
    "backwards": """
        both = associative_scan(recurrence, (decay, given), 1, True, "generic")
        return both[0] + both[1]
""",
    "along the last dimension": """
        turned = decay.mT + 0.5
        return associative_scan(torch.mul, turned, dim=2, combine_mode="generic").mT
""",
    "vmap in a loop": """
        h, steps = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            decayed = torch.vmap(torch.vmap(torch.mul))(decay[:, t], h)
            h = torch.vmap(torch.add)(decayed, given[:, t])
            steps.append(h)
        return torch.stack(steps, 1)
""",
}


@pytest.mark.parametrize("name", FORMS)
def test_it_is_of_any_length(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    module, checkpoint, code = saved_net(CODE + FORMS[name])
    inputs = parse_inputs(["x:[batch,length,3]"])
    formats = ["exported_program", "onnx"]
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format=formats)
    program = torch.export.load(bundle.folder / "gradient.pt2").module()
    onnx = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    for length in (2, 3, 7, 16, 33):
        x = torch.randn(2, length, 3)
        expected, _ = assert_same(program, module, x, atol=1e-5)
        (output,) = onnx.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), expected)


def test_what_torch_has_on_gpus_alone_names_what_has_a_gradient(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    """Torch 2.14 takes it on the CPU, too, without a gradient."""
    _, checkpoint, code = saved_net(CODE + "        return associative_scan(torch.mul, decay, 1)\n")
    inputs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed, match=r"combine_mode=.*--shim auto"):
        api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format=["onnx"])
