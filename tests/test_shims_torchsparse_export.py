"""Models that import torchsparse are exported as they are, for any number of points."""

from pathlib import Path
from typing import Any

import torch

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

# Points in voxels by their hashes, down and up again, and back to points, as SPVNAS has them.
CODE = """
import torch
import torchsparse
import torchsparse.nn as spnn
import torchsparse.nn.functional as spf
from torch import nn
from torchsparse import SparseTensor
from torchsparse.nn.utils import get_kernel_offsets


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(3, 4, 3), spnn.BatchNorm(4), spnn.ReLU(True))
        self.down = nn.Sequential(spnn.Conv3d(4, 6, 2, stride=2), spnn.ReLU(True))
        self.coarse = nn.Sequential(spnn.Conv3d(6, 6, 3, bias=True), spnn.GroupNorm(2, 6))
        self.up = spnn.Conv3d(6, 4, 2, stride=2, transposed=True)
        self.last = nn.Linear(8, 5)
        self.pool = spnn.GlobalMaxPool()

    def forward(self, features, coords):
        cells = torch.cat([coords[:, :1], coords[:, 1:] // 2], 1)
        hashes = spf.sphash(cells)
        known = torch.unique(hashes)
        index = spf.sphashquery(hashes, known)
        count = spf.spcount(index.int(), len(known))
        place = torch.round(spf.spvoxelize(cells.to(features.dtype), index, count)).int()
        x = self.stem(SparseTensor(spf.spvoxelize(features, index, count), place))
        y = self.coarse(self.down(x))
        x = torchsparse.cat([x, self.up(y)])
        points = coords[:, [1, 2, 3, 0]].to(features.dtype) / 2
        corners = spf.sphash(
            torch.floor(points).int(), get_kernel_offsets(2, device=features.device)
        )
        around = spf.sphashquery(corners, spf.sphash(x.C[:, [1, 2, 3, 0]])).t()
        weights = spf.calc_ti_weights(points[:, :3], around)
        return self.last(spf.spdevoxelize(x.F, around, weights)), self.pool(y), y.C
"""


def saved(tmp_path: Path, code: str) -> tuple[Path, str]:
    """A checkpoint of random weights, and its code as `--model` names it."""
    file, checkpoint = tmp_path / "net.py", tmp_path / "net.pth"
    file.write_text(code)
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    with shims.installed("torchsparse"):
        exec(code, namespace)
        torch.save(namespace["Net"]().state_dict(), checkpoint)
    return checkpoint, f"{file}:Net"


def test_from_points_to_voxels_and_back(tmp_path: Path) -> None:
    inputs = ["features:[n,3]", "coords:int32[n,4]<2x12x12x12"]
    verified(tmp_path / "b", saved(tmp_path, CODE), inputs, ["torchsparse"])
