"""Short-time Fourier transforms and back, as vocoders and separators of sources have them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.capture import capture
from fuseport.exporter.models.model import Model
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(9, 1))
        self.window = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x):
        by = {"n_fft": 16, "hop_length": 4, "win_length": 12, "normalized": True}
        z = torch.stft(x, window=self.window, return_complex=True, **by)
        return torch.istft(z * self.gain, window=self.window, length=x.shape[-1], **by)
"""


def test_a_signal_of_any_length_comes_back_as_long(
    tmp_path: Path, saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]]
) -> None:
    """A batch of them: what its windows add up to is that of each."""
    _, checkpoint, model = saved_net(NET)
    inputs = parse_inputs(["x:[batch,length]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code(strict=True) == 0, report.failures()


# As long as the longest of a batch, of which there are lengths.
LONGEST = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(9, 1))
        self.register_buffer("window", torch.rand(12) + 0.5)

    def forward(self, x, lengths):
        by = {"n_fft": 16, "hop_length": 4, "win_length": 12}
        z = torch.stft(x, window=self.window, return_complex=True, **by)
        return torch.istft(z * self.gain, window=self.window, length=lengths.max(), **by)
"""


def test_a_signal_comes_back_as_long_as_values_say(
    tmp_path: Path, saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]]
) -> None:
    _, checkpoint, model = saved_net(LONGEST)
    inputs = parse_inputs(["x:[batch,length]", "lengths:int64[batch]>=1<=length"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code(strict=True) == 0, report.failures()


LENGTHS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda lengths: lengths.max(),
    "an item": lambda lengths: lengths[0].item(),
    "a number": lambda lengths: int(lengths.max()) + 3,
    "known": lambda lengths: torch.tensor(29),
}
FORMS: dict[str, dict[str, Any]] = {
    "as usual": {"n_fft": 16, "window": torch.hann_window(16)},
    "without a window": {"n_fft": 16, "hop_length": 5},
    "not centered": {"n_fft": 16, "hop_length": 4, "center": False, "window": torch.ones(16)},
    "of both sides": {"n_fft": 16, "onesided": False, "normalized": True},
    "complex": {"n_fft": 16, "onesided": False, "return_complex": True},
    "a narrow window": {"n_fft": 14, "win_length": 10, "window": torch.ones(10)},
}


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", LENGTHS)
def test_signals_of_lengths_by_values_are_torchs(form: str, of: str) -> None:
    by, generator = FORMS[form], torch.Generator().manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            spectrum = torch.complex(*(x * self.gain).unbind(0))
            signal = torch.istft(spectrum, length=LENGTHS[of](lengths), **by)
            return torch.view_as_real(signal) if signal.is_complex() else signal

    high = by["n_fft"] if by.get("onesided") is False else by["n_fft"] // 2 + 1
    specs = [
        TensorSpec("x", "float32", (2, "batch", high, 12)),
        TensorSpec("lengths", "int64", ("batch",), 41),
    ]
    net = Net().eval()
    x = torch.randn(2, 3, high, 12, generator=generator)
    inputs = {"x": x, "lengths": torch.tensor([30, 20, 25])}
    model = Model(net, "user", {}, tuple(specs), {"batch": 3}, given=inputs)
    forward, gradient = capture(model)
    # Beyond the last frame of a narrow window torch has no values, and raises an error.
    beyond = [] if "win_length" in by else [[40, 1, 2], [70, 1, 2]]
    for lengths in ([30, 20, 25], [9, 3, 1], *beyond):
        x = torch.randn(2, 3, high, 12, generator=generator, requires_grad=True)
        longest = torch.tensor(lengths)
        wanted = net(x, longest)
        seed = torch.randn(wanted.shape, generator=generator)
        gradients = torch.autograd.grad(wanted, [x, net.gain], seed)
        given = x.detach(), longest
        found = forward.exported.module(check_guards=False)(*given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        found = gradient.exported.module(check_guards=False)(*given, seed)
        for name, value in zip(("x", "gain"), gradients, strict=True):
            torch.testing.assert_close(found[f"grad/{name}"], value, rtol=1e-3, atol=1e-3)
