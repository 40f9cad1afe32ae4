"""What is so at all sizes that are compared, and not at others, holds in artifacts as well."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.bundle import hash_file

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

BLOCKS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return y.sin() if x.shape[1] // 8 % 2 == 0 else {otherwise}
"""


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_artifacts_refuse_where_code_goes_another_way_between_the_sizes_compared(
    saved_net: SavedNet, tmp_path: Path, format: str
) -> None:
    module, checkpoint, code = saved_net(BLOCKS.format(otherwise="y.cos()"))
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs="x:[batch,length,4]", format=format
    )
    (said,) = bundle.manifest["programs"]["forward"]["conditions"]
    assert said == "length is 1 to 7, 16 to 23 and so on"
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code() == 0, report.failures()
    if format == "torchscript":
        artifact = torch.jit.load(bundle.folder / "forward.pt")
        for length in (5, 20, 32):
            x = torch.ones(2, length, 4)
            torch.testing.assert_close(artifact(x), module(x))
        with pytest.raises(Exception, match="holds only where length"):
            artifact(torch.ones(2, 24, 4))


def test_what_makes_no_difference_there_is_let_go_of(saved_net: SavedNet, tmp_path: Path) -> None:
    module, checkpoint, code = saved_net(BLOCKS.format(otherwise="-(-y).sin()"))
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs="x:[batch,length,4]", format="torchscript"
    )
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    x = torch.ones(2, 24, 4)
    torch.testing.assert_close(torch.jit.load(bundle.folder / "forward.pt")(x), module(x))


DOUBLED = """
import torch
from torch.nn.functional import pad

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = torch.nn.Parameter(torch.full((4,), {decay}))

    def forward(self, x):
        decay, step = self.decay, 1
        while step < x.shape[1]:
            x = x + decay * pad(x, (0, 0, step, 0))[:, :-step]
            decay, step = decay * decay, step * 2
        return x
"""


@pytest.mark.parametrize("decay", [0.36, 0.4, 0.45])
def test_a_window_that_is_forgotten_is_not_taken_for_all(
    saved_net: SavedNet, tmp_path: Path, decay: float
) -> None:
    """A sum so far of sixteen steps is off at others by little: in outputs, or gradients alone."""
    _, checkpoint, code = saved_net(DOUBLED.format(decay=decay))
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs="x:[batch,length,4]", format="torchscript"
    )
    with pytest.raises(Exception, match="holds only where"):
        torch.jit.load(bundle.folder / "forward.pt")(torch.ones(1, 32, 4))
    report = api.verify(bundle.folder, model=code, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()


class Shifted(nn.Module):
    """What has a gradient of the decay at any size."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.full((4,), 0.9))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"output": x + self.decay}


def test_zeros_are_no_gradient_where_a_size_leaves_a_parameter_out(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    """Of one step there is no decay in the model, and zeros as its gradient in programs."""
    _, checkpoint, code = saved_net(DOUBLED.format(decay=0.9))
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs="x:[batch,length,4]", format="torchscript"
    )
    report = api.verify(bundle.folder, model=code, runtime=["torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert "grad/decay" in {r.tensor for r in report.results if r.case == "every dimension 1"}
    file = tmp_path / "shifted.pt"
    torch.jit.script(Shifted()).save(file)
    report = api.verify(
        bundle.folder,
        model=code,
        runtime=["torchscript"],
        artifact=file,
        trust_native=[hash_file(file)],
    )
    wrong = [r for r in report.results if r.case == "every dimension 1" and r.verdict == "fail"]
    assert "gradient where the model has none" in {r.reason for r in wrong}
