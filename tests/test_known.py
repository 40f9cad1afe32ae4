"""Numbers that code reads of buffers are numbers in a capture."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.sizes._known import buffers_of, knowing

SPEC = TensorSpec("x", "float32", ("batch", "length", 4))


class Net(nn.Module):
    """Computes something by what it reads of its buffers."""

    steps: Tensor
    scale: Tensor
    sizes: Tensor
    flag: Tensor
    table: Tensor

    def __init__(self, by: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("sizes", torch.tensor([[2, 1], [1, 3]]))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("table", torch.arange(8.0))
        self.constant = torch.tensor(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.by(self, x * self.weight)


def written(net: Net, x: Tensor) -> Tensor:
    sizes = net.sizes.clone()
    sizes.view(4)[0] = x.shape[1]
    return x * sizes.sum().item()


READ: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "item": lambda net, x: F.pad(x, (0, 0, net.steps.item(), 0)),
    "int": lambda net, x: x.repeat(1, int(net.steps), 1),
    "float": lambda net, x: x * float(net.scale),
    "bool": lambda net, x: x.exp() if net.flag else x,
    "index": lambda net, x: torch.stack([x] * net.steps.__index__()),
    "is_nonzero": lambda net, x: x.exp() if torch.is_nonzero(net.steps) else x,
    "tolist": lambda net, x: torch.cat([x * n for row in net.sizes.tolist() for n in row], -1),
    "a list of one dimension": lambda net, x: torch.cat(
        x.split(net.sizes[1].tolist(), -1)[::-1], -1
    ),
    "computed": lambda net, x: F.pad(x, (0, 0, (2 * net.steps - net.sizes[1, 1]).item(), 0)),
    "a condition": lambda net, x: x.exp() if (net.table > 6).any() else x,
    "a length that is compared": lambda net, x: x.exp() if x.shape[1] < 100 * int(net.steps) else x,
    "a loop": lambda net, x: sum((x + i for i in range(net.steps)), x),
    "a constant": lambda net, x: x.repeat(1, 1, net.constant.item()),
    "made of numbers": lambda net, x: x * torch.full((3,), 2.0).sum().item(),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_of_buffers_is_known(name: str) -> None:
    net = Net(READ[name]).eval()
    program = capture_forward(net, {"x": torch.randn(2, 6, 4)}, [SPEC])
    assert not program.exported.range_constraints.keys() & {
        symbol for symbol in program.exported.range_constraints if str(symbol).startswith("u")
    }
    x = torch.randn(3, 9, 4)
    torch.testing.assert_close(program.exported.module()(x), net(x))


def test_of_what_was_written_to_nothing_is_known() -> None:
    net = Net(written).eval()
    x = torch.randn(2, 6, 4)
    program = capture_forward(net, {"x": x}, [SPEC])
    torch.testing.assert_close(program.exported.module()(x), net(x))


def test_of_what_hangs_on_inputs_nothing_is_known() -> None:
    net = Net(lambda net, x: x * (net.table[: x.shape[1]].sum() + x.sum()).item()).eval()
    program = capture_forward(net, {"x": torch.randn(2, 6, 4)}, [SPEC])
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(program.exported.module()(x), net(x))


def test_a_buffer_that_is_written_to_is_refused() -> None:
    def by(net: Net, x: Tensor) -> Tensor:
        net.steps += 1
        return x * net.steps.item()

    with pytest.raises(ExportFailed, match="writes to steps"):
        capture_forward(Net(by).eval(), {"x": torch.randn(2, 6, 4)}, [SPEC])


def test_outside_of_a_capture_nothing_is_known() -> None:
    net = Net(READ["item"])
    with knowing(net, buffers_of(net)):
        assert net(torch.ones(1, 2, 4)).shape == (1, 5, 4)


CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("longest", torch.tensor(16))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        while x.shape[1] > self.longest.item():
            with torch.no_grad():
                self.linear.weight.mul_(2)
            self.longest = 2 * self.longest
        n = int(self.longest)
        y = torch.fft.irfft(torch.fft.rfft(self.linear(x), n=2 * n, dim=1), n=2 * n, dim=1)
        return y[:, : x.shape[1]] * float(self.scale)
"""


def test_a_length_that_is_kept_in_a_buffer_is_exported_and_verified(
    tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    _, checkpoint, model = saved_net(CODE)
    inputs, wanted = parse_inputs(["x:[batch,length,4]"]), ["torchscript", "onnx"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    said = bundle.manifest["programs"]["forward"]
    assert said["conditions"]
    assert "decided" not in said
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
