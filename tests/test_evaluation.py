"""Models are put into evaluation, whatever their own `train` returns."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fuseport.exporter import api

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

# As mmpretrain's backbones have it.
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def train(self, mode=True):
        super().train(mode)

    def forward(self, x):
        return self.drop(self.linear(x))
"""


def test_a_model_whose_train_returns_nothing_is_exported_and_verified(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    module, checkpoint, code = saved_net(CODE)
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=["x:[batch,8]"], format="torchscript"
    )
    report = api.verify(bundle.folder, model=code, runtime=["eager", "torchscript"])
    assert report.exit_code(strict=True) == 0, report.failures()
    x = torch.ones(3, 8)
    found = torch.jit.load(bundle.folder / "forward.pt")(x)
    torch.testing.assert_close(found, module.linear(x))
