"""Models that import MinkowskiEngine are exported as they are, for any number of voxels."""

from pathlib import Path
from typing import Any

import torch

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

# Down and up again, over voxels on both sides of 0.
CODE = """
import MinkowskiEngine as ME
import MinkowskiEngine.MinkowskiFunctional as MEF
import torch
from MinkowskiEngine.modules.resnet_block import BasicBlock
from torch import nn


class Net(ME.MinkowskiNetwork):
    def __init__(self):
        super().__init__(3)
        self.first = ME.MinkowskiConvolution(3, 4, 3, bias=True, dimension=3)
        self.norm = ME.MinkowskiInstanceNorm(4)
        self.down = ME.MinkowskiConvolution(4, 6, 2, 2, dimension=3)
        self.block = BasicBlock(6, 6, dimension=3)
        self.most = ME.MinkowskiMaxPooling(3, 2, dimension=3)
        self.up = ME.MinkowskiConvolutionTranspose(6, 4, 3, 2, dimension=3)
        self.last = ME.MinkowskiLinear(8, 5)
        self.pool = ME.MinkowskiGlobalMaxPooling()
        self.add = ME.MinkowskiBroadcastAddition()

    def forward(self, features, coords):
        coords = torch.cat([coords[:, :1], coords[:, 1:] - 4], 1)
        x = ME.SparseTensor(features, coords.int())
        fine = MEF.relu(self.norm(self.first(x)))
        coarse = self.block(self.down(fine))
        whole = self.pool(coarse)
        y = self.last(ME.cat(fine, self.up(self.add(coarse, whole))))
        return {"voxels": y.F, "coarse": self.most(coarse).F, "whole": whole.F}
"""

# Points in cells, voxels that are made and pruned, and sums of those that differ.
GENERATIVE = """
import MinkowskiEngine as ME
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(ME.MinkowskiSinusoidal(3, 4), ME.MinkowskiToSparseTensor())
        self.down = ME.MinkowskiConvolution(4, 4, 3, 2, dimension=2)
        self.up = ME.MinkowskiGenerativeConvolutionTranspose(4, 4, 2, 2, dimension=2)
        self.prune = ME.MinkowskiPruning()
        self.mean = ME.MinkowskiAvgPooling(2, 2, dimension=2)

    def forward(self, features, coords):
        batch = coords[:, :1].round()
        points = ME.TensorField(features, torch.cat([batch, 9 * coords[:, 1:]], 1))
        x = self.field(points)
        y = self.up(self.down(x))
        y = self.prune(y, y.C[:, 1] % 4 != 1)
        both = x + y
        return both.F, both.C, self.mean(both).F, x.slice(points).F
"""


def saved(tmp_path: Path, code: str) -> tuple[Path, str]:
    """A checkpoint of random weights, and its code as `--model` names it."""
    file, checkpoint = tmp_path / "net.py", tmp_path / "net.pth"
    file.write_text(code)
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    with shims.installed("MinkowskiEngine"):
        exec(code, namespace)
        torch.save(namespace["Net"]().state_dict(), checkpoint)
    return checkpoint, f"{file}:Net"


def test_down_and_up_again(tmp_path: Path) -> None:
    """Rows of coordinates, of which some may be alike, and batches of any number."""
    inputs = ["features:[n,3]", "coords:int32[n,4]<2x9x8x7"]
    verified(tmp_path / "b", saved(tmp_path, CODE), inputs, ["MinkowskiEngine"])


def test_voxels_that_are_made_and_pruned(tmp_path: Path) -> None:
    inputs = ["features:[n,3]", "coords:[n,3]"]
    verified(tmp_path / "b", saved(tmp_path, GENERATIVE), inputs, ["MinkowskiEngine"])
