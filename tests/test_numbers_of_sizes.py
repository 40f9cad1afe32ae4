"""Numbers that code makes of conditions on sizes, and tensors of numbers that hang on values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x, lengths):
        return self.a(x) * FACTOR
"""

FACTORS = {
    "new_tensor": "x.new_tensor(lengths.tolist())[:, None, None]",
    "new_tensor of a dtype": "x.new_tensor(lengths.tolist(), dtype=torch.int32)[:, None, None]",
    "new": "x.new(lengths.tolist())[:, None, None]",
}


@pytest.mark.parametrize("name", FACTORS)
def test_it_is_that_of_each_call(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    module, checkpoint, code = saved_net(CODE.replace("FACTOR", FACTORS[name]))
    inputs = parse_inputs(["x:[2,length,3]", "lengths:int64[2]<=length"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, programs="forward",
        format="torchscript",
    )  # fmt: skip
    program = torch.jit.load(bundle.folder / "forward.pt")
    with torch.no_grad():
        for length in (3, 4, 5, 9):
            given = torch.randn(2, length, 3), torch.tensor([length, length - 2])
            torch.testing.assert_close(program(*given), module(*given))


def test_a_condition_as_a_float_is_decided(saved_net: SavedNet, tmp_path: Path) -> None:
    """As `if` is: the program says for which sizes it holds."""
    factor = "(float(x.shape[1] > 4) + 0.5)"
    module, checkpoint, code = saved_net(CODE.replace("FACTOR", factor))
    inputs = parse_inputs(["x:[2,length,3]", "lengths:int64[2]<=length"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, programs="forward",
        format="torchscript",
    )  # fmt: skip
    program = torch.jit.load(bundle.folder / "forward.pt")
    with torch.no_grad():
        for length in (5, 9):
            given = torch.randn(2, length, 3), torch.tensor([length, length - 2])
            torch.testing.assert_close(program(*given), module(*given))
        with pytest.raises(torch.jit.Error, match="holds only where length >= 5"):
            program(torch.randn(2, 4, 3), torch.tensor([2, 3]))


def inverse(spectra: Tensor, n_fft: int, **by: object) -> Tensor:
    return torch.istft(spectra, n_fft, window=torch.ones(n_fft), **by)


SIGNALS: dict[str, Callable[[Tensor], Tensor]] = {
    "as long as its frames": lambda s: inverse(s, 9, hop_length=4),
    "of one signal": lambda s: inverse(s[0], 9, hop_length=4),
    "as long as a size": lambda s: inverse(s, 9, hop_length=3, length=s.shape[2] * 2),
    "as long as a number": lambda s: inverse(s, 9, hop_length=3, length=5),
    "from its first frame on": lambda s: inverse(s, 9, hop_length=3, center=False),
    "normalized": lambda s: inverse(s, 9, hop_length=4, normalized=True),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_an_odd_transform_is_undone_at_any_length(name: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return SIGNALS[name](torch.view_as_complex(x))

    generator = torch.Generator().manual_seed(3)
    spec = TensorSpec("x", "float32", ("batch", 5, "frames", 2))
    example = torch.randn(2, 5, 7, 2, generator=generator)
    forward = capture_forward(Net(), {"x": example}, [spec])
    gradient = capture_gradient(forward)
    for batch, frames in (1, 4), (3, 8), (2, 7):
        x = torch.randn(batch, 5, frames, 2, generator=generator).requires_grad_()
        y = Net()(x)
        cotangent = torch.randn(y.shape, generator=generator)
        (dx,) = torch.autograd.grad(y, x, cotangent)
        torch.testing.assert_close(forward.exported.module()(x.detach()), y.detach())
        found = gradient.exported.module()(x.detach(), cotangent)
        torch.testing.assert_close(found["grad/x"], dx, rtol=1e-4, atol=1e-5)
