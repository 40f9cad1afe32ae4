"""Places of a triangle of a matrix, and rows of one feature, as many as inputs say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.instead._triangles import TRIANGLES, _of_growing

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(1, 4)
        self.c = nn.Parameter(torch.linspace(-1, 1, 8).reshape(1, 8))

    def forward(self, x, n):
{body}
"""

SIZES = """
        size = x.shape[0]
        return tuple(
            of(size, other, offset)
            for of in (torch.triu_indices, torch.tril_indices)
            for other in (size, size + 3, 4)
            for offset in (0, 1, 2, -1, -2)
        )
"""

PAIRS = """
        size = x.shape[0]
        i, j = torch.triu_indices(size, size, 1, device=x.device)
        squares = (x[i] - x[j]).square().sum(-1)
        near = squares[squares < 1][:, None]
        y = torch.tanh(self.b(near)) + (near @ self.c)[:, :4]
        most = int(n.max())
        k, l = torch.tril_indices(most, most, -1)
        z = torch.cat([self.a(x), x.new_ones(8, 4)])
        return y.sum(0), (z[k] * z[l]).sum(0)
"""


def test_places_are_those_of_torch_at_any_size(saved_net: SavedNet, tmp_path: Path) -> None:
    module, checkpoint, code = saved_net(CODE.format(body=SIZES))
    inputs = parse_inputs(["x:[batch,3]", "n:int64[batch]<9"])
    options = {"programs": "forward", "format": "torchscript"}
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, **options)
    program = torch.jit.load(bundle.folder / "forward.pt")
    for size in (1, 2, 5, 33):
        given = torch.zeros(size, 3), torch.zeros(size, dtype=torch.int64)
        found, wanted = program(*given).values(), module(*given)
        assert len(wanted) == len(list(found)) == 30
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_pairs_have_gradients_at_any_size(saved_net: SavedNet, tmp_path: Path) -> None:
    _, checkpoint, code = saved_net(CODE.format(body=PAIRS))
    inputs = parse_inputs(["x:[batch,3]", "n:int64[batch]<9"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs)
    for program in bundle.manifest["programs"].values():
        assert program["inputs"][0]["dims"] == ["batch", 3]
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_rows_are_exact_where_roots_are_rounded() -> None:
    rows = torch.tensor([0, 1, 2, 94_906_265, 94_906_266, 94_906_267])
    for place in (torch.zeros_like(rows), rows):
        row, at = _of_growing(rows * (rows + 1) // 2 + place)
        assert torch.equal(row, rows)
        assert torch.equal(at, place)


@pytest.mark.parametrize("of", TRIANGLES)
def test_sizes_that_are_numbers_are_left_to_torch(of: Callable[..., object]) -> None:
    assert TRIANGLES[of](4, 4, 1) is NotImplemented
