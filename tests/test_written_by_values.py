"""Parts of a tensor that are written where the value of another says: `x[i] = y`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.instead._written_by_values import written
from fuseport.exporter.program.sizes.symbolic import Symbolic

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

AT, LAST = torch.tensor(1), torch.tensor(-1, dtype=torch.int32)

INDICES: dict[str, Any] = {
    "alone": AT,
    "in a tuple": (AT,),
    "behind a slice": (slice(1, None), LAST),
    "behind all else": (..., LAST),
    "before all else": (LAST, ...),
    "on both sides": (AT, ..., LAST),
    "twice": (AT, LAST),
    "beside a number": (1, AT),
    "behind a number": (slice(None), -1, LAST),
    "with a new dimension": (None, AT, slice(None, None, 2)),
    "all": (AT, AT, AT),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("given", ["a number", "as it is", "of another type", "with ones before"])
def test_it_is_what_torch_writes(name: str, given: str) -> None:
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(3, 4, 5, generator=generator)
    value: Any = torch.randn(x[INDICES[name]].shape, generator=generator)
    if given == "a number":
        value = 7
    elif given == "of another type":
        value = value.double()
    elif given == "with ones before":
        value = value[None, None]
    wanted = x.clone()
    wanted[INDICES[name]] = value
    assert written(x, INDICES[name], value) is None
    assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    "index",
    [
        0,
        slice(1, 2),
        (AT, [0, 1]),
        (AT, torch.tensor([0, 1])),
        (torch.tensor(True), AT),
        (slice(AT, None), LAST),
        torch.tensor([True, False, True]),
    ],
)
def test_other_parts_are_left_to_torch(index: Any) -> None:
    x = torch.zeros(3, 4, 5)
    assert written(x, index, 1) is NotImplemented
    assert not x.any()


CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        best = y.sum((0, 2)).argmax()
        kept = x.clone()
        kept[:, best] = y[:, best.item()]
        kept[..., best % 4] = kept[0, best.item(), 0]
        return kept
"""


class Ends(nn.Module):
    """Writes at places that sizes say, of several indices, where torch makes numbers of them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ends, before, spread = x.clone(), torch.zeros_like(x), x.clone()
        ends[x.size(0) - 1, :] = x[0]
        before[:, x.size(1) - 2, 1:] = x[None, :, 0, 1:]
        spread[..., x.size(1) - 1, x.size(2) - 1] = 7
        return ends, before, spread


def test_sizes_say_where_too() -> None:
    dims = dict.fromkeys(range(3), torch.export.Dim.DYNAMIC)
    generator = torch.Generator().manual_seed(41)
    with Symbolic():
        program = torch.export.export(
            Ends(), (torch.randn(3, 4, 6, generator=generator),), dynamic_shapes=(dims,)
        )
    x = torch.randn(2, 5, 3, generator=generator)
    torch.testing.assert_close(program.module()(x), Ends()(x), rtol=0, atol=0)


def test_programs_write_where_values_say(saved_net: SavedNet, tmp_path: Path) -> None:
    _, checkpoint, code = saved_net(CODE)
    inputs = parse_inputs(["x:[batch,length,4]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs)
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()
