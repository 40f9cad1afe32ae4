"""Quotients of sizes in tensors, rounded, are sizes, also in a capture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.test_integers import Saved, assert_of_any_length

SPEC = TensorSpec("x", "float32", ("batch", "length", 4))


def size(x: Tensor) -> Tensor:
    return torch.tensor(x.shape[1])


# Each is how many thirds of the length there are, rounded up.
KNOWN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "ceil": lambda x, third: torch.ceil(size(x) / third).to(torch.int64),
    "div": lambda x, third: torch.div(size(x), third).ceil().long().item(),
    "floor": lambda x, third: torch.floor((size(x) - 1) / 3 + 1).long(),
    "cut off": lambda x, third: ((size(x) + third - 1) / third).long(),
    "below zero": lambda x, third: -1 * torch.floor(0 - size(x) / third).int(),
    "times": lambda x, third: (2 * torch.ceil(size(x) / third)).long() // 2,
    "of a buffer": lambda x, third: (x.shape[1] - third + 5) // third,
    "largest": lambda x, third: torch.maximum(third, (x.shape[1] - third + 5) // third + 9) - 9,
}


class Thirds(nn.Module):
    """Needs to know that these are as many as there are steps."""

    def __init__(self, count: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.count = count
        self.third: Tensor = nn.Buffer(torch.tensor(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::3] + torch.zeros(self.count(x, self.third), 4)


@pytest.mark.parametrize("name", KNOWN)
def test_a_rounded_quotient_is_a_size(name: str) -> None:
    module = Thirds(KNOWN[name])
    program = capture_forward(module, {"x": torch.randn(2, 7, 4)}, [SPEC]).exported
    assert not any("item" in str(node.target) for node in program.graph.nodes)
    for length in (1, 2, 3, 6, 8, 301):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(program.module()(x), module(x))


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "by a size": lambda x, third: torch.ceil(third / size(x) * size(x) * size(x) / 9).long(),
    "cut off below zero": lambda x, third: 1 - ((1 - size(x)) / third).long(),
    "a half": lambda x, third: torch.ceil(size(x) / third + 0.5).long(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_quotients_are_none(name: str) -> None:
    program = capture_forward(Thirds(UNKNOWN[name]), {"x": torch.randn(2, 7, 4)}, [SPEC]).exported
    assert any("item" in str(node.target) for node in program.graph.nodes)


def test_what_is_not_rounded_is_compared_by_value() -> None:
    def count(x: Tensor, third: Tensor) -> int:
        return 1 if size(x) / third == 2 else x[:, ::3].shape[1]

    module = Thirds(count)
    program = capture_forward(module, {"x": torch.randn(2, 7, 4)}, [SPEC]).exported.module()
    for length in (1, 2, 5, 7, 301):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(program(x), module(x))
    with pytest.raises(RuntimeError, match="only where what hangs on sizes alone is False"):
        program(torch.randn(2, 6, 4))


def test_what_is_not_rounded_and_hangs_on_the_length_is_refused() -> None:
    def count(x: Tensor, third: Tensor) -> int:
        return 3 if torch.ceil(size(x) / third) == size(x) / third else x[:, ::3].shape[1]

    with pytest.raises(ExportFailed, match="hangs on the values of a tensor"):
        capture_forward(Thirds(count), {"x": torch.randn(2, 7, 4)}, [SPEC])


PADDED = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(8, 8), nn.Conv1d(8, 8, 5, stride=3)
        self.window, self.step = nn.Buffer(torch.tensor(5)), nn.Buffer(torch.tensor(3))
        self.beside = nn.Buffer(self.window - self.step)

    def forward(self, x):
        x = self.a(x).mT
        steps = torch.ceil((x.shape[2] - self.window + self.beside) / self.step + 1).long() - 1
        more = steps * self.step + self.window - self.beside - x.shape[2]
        left, right = self.beside - self.beside // 2, self.beside // 2 + more
        if x.shape[2] <= max(left, right):
            x = F.pad(x, (0, max(left, right) - x.shape[2] + 1))
        return self.c(F.pad(x, (left, right)))
"""


def test_what_is_padded_to_whole_steps_is_of_any_length(tmp_path: Path, saved_with: Saved) -> None:
    """As codecs of sound do, which keep a layer's window and step in buffers."""
    conv = nn.Conv1d(8, 8, 5, stride=3)
    state = {"window": torch.tensor(5), "step": torch.tensor(3), "beside": torch.tensor(2)}

    def saved(code: str, **layers: nn.Module) -> tuple[Path, str]:
        checkpoint, model = saved_with(code, **layers, c=conv)
        torch.save(torch.load(checkpoint) | state, checkpoint)
        return checkpoint, model

    assert_of_any_length(PADDED, saved, tmp_path)
