"""Powers of 2 at or above a dynamic size, and Fourier transforms of as many values."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.sizes._logarithms import Logarithm

NET = """
import math
import numpy as np
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(6, 6)

    def forward(self, x):
        length = x.shape[1]
        y = self.a(x).mT
        sizes = [
            max(2 * 2 ** int(math.ceil(math.log2(length))), 16),
            1 << (2 * length - 1).bit_length(),
            int(2 ** np.ceil(np.log2(length))),
            length << 1,
        ]
        below = [
            2 ** int(math.log2(length)), 2 ** math.floor(math.log2(length)), (length + 3) >> 1
        ]
        changed = [torch.fft.irfft(torch.fft.rfft(y, n=n) * 2, n=n).sum(-1) + n for n in sizes]
        return torch.stack(changed + [y[..., :n].sum(-1) / n for n in below], -1)
"""


def test_powers_of_2_about_a_length_are_of_any_length(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """As H3 and Hyena make sizes of their transforms; the example's length is such a power."""
    checkpoint, model = saved_with(NET, a=torch.nn.Linear(6, 6))
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[batch,length,6]")
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_logarithms_are_those_of_whole_numbers() -> None:
    sizes = {max(2**power + by, 1) for power in range(62) for by in (-1, 0, 1)}
    for size in sorted(sizes - {2**62}):
        found: Any = Logarithm(size)  # type: ignore[arg-type]  # it computes with any
        assert math.ceil(found) == (size - 1).bit_length(), size
        assert math.floor(found) == math.trunc(found) == size.bit_length() - 1, size


def _twice(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.fft2(x, s=(16, 5), norm="ortho"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.view_as_real(torch.fft.fft(x, 16, 1)),
        lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1, n=16)),
        lambda x: torch.fft.irfft(x, n=30, dim=-2),
        lambda x: torch.fft.irfftn(x, s=(30, 9), dim=(-2, -1)),
        lambda x: torch.fft.irfft2(x.mT, (8, 30)),
        _twice,
    ],
)
def test_a_transform_fills_up_or_cuts_what_is_of_any_length(
    function: Callable[[Tensor], Tensor],
) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    draw = torch.Generator().manual_seed(0)
    spec = TensorSpec("x", "float32", ("batch", "length", 4))
    program = capture_forward(Net(), {"x": torch.randn(2, 16, 4, generator=draw)}, [spec])
    for length in (1, 7, 16, 17, 40):
        x = torch.randn(3, length, 4, generator=draw)
        torch.testing.assert_close(program.exported.module()(x), function(x))


def test_the_beginning_of_what_a_power_of_2_says_is_as_long_as_is_asked() -> None:
    """Sizes that are made of it hang on the length alone, and the file of a program is short."""

    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            length = x.shape[-1]
            size = 2 ** (2 * length - 1).bit_length()
            y = torch.fft.irfft(torch.fft.rfft(x, n=size), n=size)
            return y[..., :length], y[:, :, :length].mT, y[:, 1:, :length]

    draw = torch.Generator().manual_seed(0)
    spec = TensorSpec("x", "float32", ("batch", 4, "length"))
    program = capture_forward(Net(), {"x": torch.randn(2, 4, 16, generator=draw)}, [spec])
    assert program.outputs[0].dims == ("batch", 4, "length")
    assert program.outputs[1].dims == ("batch", "length", 4)
    for length in (1, 5, 16, 33):
        x = torch.randn(3, 4, length, generator=draw)
        for found, wanted in zip(program.exported.module()(x).values(), Net()(x), strict=True):
            torch.testing.assert_close(found, wanted)


def test_what_is_written_to_such_a_beginning_is_written() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[-1]
            y = torch.ones(x.shape[0], 4, max(16, 4 * 2 ** math.floor(math.log2(length))))
            y[..., :length] = x
            y[..., : length + 1].mul_(3)
            return y.cumsum(-1)[..., :length]

    draw = torch.Generator().manual_seed(0)
    spec = TensorSpec("x", "float32", ("batch", 4, "length"))
    program = capture_forward(Net(), {"x": torch.randn(2, 4, 17, generator=draw)}, [spec])
    assert program.outputs[0].dims == ("batch", 4, "length")
    for length in (1, 5, 16, 33):
        x = torch.randn(3, 4, length, generator=draw)
        torch.testing.assert_close(program.exported.module()(x), Net()(x))
