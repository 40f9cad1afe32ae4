"""Models of voxels are exported for any number of them, by the stand-in for spconv."""

from pathlib import Path
from typing import Any

import torch

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

CODE = """
import spconv.pytorch as spconv
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(3, 4, 3, padding=1, bias=False, indice_key="fine"),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            spconv.SubMConv3d(4, 4, 3, indice_key="fine"),
        )
        self.down = spconv.SparseConv3d(4, 6, 3, stride=2, padding=1, indice_key="down")
        self.coarse = spconv.SparseSequential(spconv.SubMConv3d(6, 6, 3), nn.BatchNorm1d(6))
        self.pool = spconv.SparseMaxPool3d(2, 2)
        self.up = spconv.SparseInverseConv3d(6, 5, 3, indice_key="down")
        self.dense = spconv.ToDense()

    def forward(self, features, coords):
        x = self.stem(spconv.SparseConvTensor(features, coords, [9, 8, 7], 2))
        y = self.coarse(self.down(x))
        return {"voxels": self.up(y).features, "map": self.dense(self.pool(y))}
"""

# Sizes that hang on the voxels, and a shape of each scale of its own.
BY_VALUES = """
import spconv.pytorch as spconv
import torch
from spconv.pytorch import functional
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = spconv.SubMConv2d(3, 4, 5, bias=True)
        self.wide = spconv.SparseConvTranspose2d(4, 4, 2, 2)

    def forward(self, features, coords):
        shape = (coords[:, 1:].max(0).values + 8).tolist()
        x = spconv.SparseConvTensor(features, coords, shape, coords[:, 0].max().item() + 1)
        x = self.first(x)
        y = self.wide(x)
        return functional.sparse_add(x, x).features, y.features.sum(0), y.indices
"""


def saved(tmp_path: Path, code: str) -> tuple[Path, str]:
    """A checkpoint of random weights, and its code as `--model` names it."""
    file, checkpoint = tmp_path / "net.py", tmp_path / "net.pth"
    file.write_text(code)
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    with shims.installed("spconv"):
        exec(code, namespace)
        torch.save(namespace["Net"]().state_dict(), checkpoint)
    return checkpoint, f"{file}:Net"


def test_down_and_up_again(tmp_path: Path) -> None:
    """In two steps, each with as many voxels as there are by those before it."""
    inputs = ["features:[n,3]", "coords:int32[n,4]<2x9x8x7"]
    verified(tmp_path / "b", saved(tmp_path, CODE), inputs, ["spconv"])


def test_volumes_that_hang_on_the_voxels(tmp_path: Path) -> None:
    inputs = ["features:[n,3]", "coords:int32[n,3]<2x40x30"]
    verified(tmp_path / "b", saved(tmp_path, BY_VALUES), inputs, ["spconv"])
