"""Lists of ranges of numbers are numbers, also in a capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward

SPEC = TensorSpec("x", "float32", ("batch", 3, 4))
LISTED: dict[str, Callable[[Tensor], Any]] = {
    "from a number on": lambda x: torch.arange(1, x.dim()).tolist(),
    "from 0 on": lambda x: torch.arange(x.dim() - 1).tolist(),
    "backwards": lambda x: torch.arange(2, 0, -1).tolist(),
    "by name": lambda x: torch.arange(start=0, end=x.dim(), step=2).tolist(),
    "of few bits": lambda x: torch.arange(1, 3, dtype=torch.int32).tolist(),
    "twice": lambda x: [(axes := torch.arange(1, 3)).tolist(), axes.tolist()][1],
}


class Means(nn.Module):
    """As asteroid's norms: the mean over the axes of a list."""

    def __init__(self, axes: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=self.axes(x), keepdim=True)


@pytest.mark.parametrize("name", LISTED)
def test_the_list_of_a_range_is_known(name: str) -> None:
    model = Means(LISTED[name])
    program = capture_forward(model, {"x": torch.randn(2, 3, 4)}, [SPEC])
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(program.exported.module()(x), model(x))


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        axes = torch.arange(1, 3)
        axes.view(-1)[0] = 0
        first, second = axes.tolist()
        return x * first + x * second


def test_a_range_that_was_written_to_is_none() -> None:
    program = capture_forward(Written(), {"x": torch.randn(2, 3, 4)}, [SPEC])
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(program.exported.module()(x), 2 * x)
