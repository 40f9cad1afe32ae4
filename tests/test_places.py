"""Inputs that are rows of coordinates: bounds for each column, and how rows are drawn."""

import math

import pytest
import torch
from torch import Tensor

from fuseport.exporter.errors import UsageError
from fuseport.exporter.models._inputs import kept
from fuseport.exporter.models._places import places, volume_of
from fuseport.exporter.models.given import Given, specs_of
from fuseport.exporter.models.model import example
from fuseport.exporter.models.user import parse_inputs


def neighbours(rows: Tensor) -> int:
    """How many rows have another within a step in each column."""
    apart = (rows[:, None] - rows).abs().amax(-1)
    return int(((apart <= 1).sum(1) > 1).sum())


@pytest.mark.parametrize(
    ("count", "volume"),
    [
        (1, (2, 9, 8, 7)),
        (16, (2, 41, 1600, 1408)),
        (100, (2, 3, 4, 5)),
        (500, (1, 400, 400)),
        (0, (2, 2)),
    ],
)
def test_rows_differ_lie_inside_and_have_neighbours(count: int, volume: tuple[int, ...]) -> None:
    starts = set()
    for seed in range(5):
        rows = places(count, volume, torch.Generator().manual_seed(seed))
        assert rows.shape == (count, len(volume))
        assert len(rows.unique(dim=0)) == count
        assert ((rows >= 0) & (rows < torch.tensor(volume))).all()
        assert neighbours(rows) >= count // 2
        starts.add(tuple(rows.amin(0).tolist() if count else ()))
    assert len(starts) > 1 or count == 0 or count > math.prod(volume) // 2


def test_of_more_rows_than_places_some_are_alike() -> None:
    rows = places(30, (2, 3), torch.Generator().manual_seed(0))
    assert rows.shape == (30, 2)
    assert len(rows.unique(dim=0)) == 6


def test_bounds_of_columns_are_written_with_an_x() -> None:
    features, coords = parse_inputs(["features:[n,3],coords:int32[n,4]<2x41x400x352"])
    assert coords.high == (2, 41, 400, 352)
    assert features.high is None
    drawn = example(coords, {"n": 12}, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.int32
    assert (drawn < torch.tensor(coords.high)).all()
    (equal,) = parse_inputs(["x:int64[b,n,2]<=1x4"])
    assert equal.high == (2, 5)
    assert example(equal, {"b": 2, "n": 3}, torch.Generator()).shape == (2, 3, 2)
    assert kept({"inputs": [["x", "int64", ["n", 2], [2, 5]]]})[0].high == (2, 5)
    for text in ("x:int64[n,3]<2x4", "x:int64[n]<2x4", "x:int64[n,2]>=1<2x4", "x:int64[n,2]<2x0"):
        with pytest.raises(UsageError, match="a bound for each column"):
            parse_inputs([text])


def test_rows_that_are_given_and_all_different_are_places() -> None:
    rows = torch.tensor([[0, 3, 1], [1, 0, 7], [0, 3, 2]])
    assert volume_of(rows) == (2, 4, 8)
    (spec,) = specs_of(Given("here", {"coords": rows}), _Takes())
    assert spec.high == (2, 4, 8)
    for others in (rows[[0, 0]], rows[:1], rows[:, :1], rows.T.repeat(1, 2), rows - 1):
        assert volume_of(others) is None


class _Takes(torch.nn.Module):
    def forward(self, coords: Tensor) -> Tensor:
        return coords
