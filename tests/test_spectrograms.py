"""Short-time Fourier transforms and back, as vocoders and separators of sources have them."""

from collections.abc import Callable
from pathlib import Path

import torch

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

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
