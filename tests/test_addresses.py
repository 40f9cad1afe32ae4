"""What code may ask of a tensor's address in a capture: how it is aligned."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.instead._addresses import ALIGNED, Address

SPEC = TensorSpec("x", "float32", ("batch", 4))


class Aligned(nn.Module):
    """As flash-attention's norms: `maybe_align`."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.contiguous() * 2
        y = y if y.data_ptr() % 16 == 0 else y.clone()
        return y.sin() if (x.data_ptr() & 15) == 0 else x


def test_code_that_copies_what_is_not_aligned_is_captured() -> None:
    x = torch.randn(3, 4)
    program = capture_forward(Aligned(), {"x": x}, [SPEC])
    assert not [n for n in program.exported.graph.nodes if "clone" in str(n.target)]
    found = program.exported.module()(torch.cat([x, x]))
    torch.testing.assert_close(found, (2 * torch.cat([x, x])).sin())


@pytest.mark.parametrize("by", [1, 8, 16, ALIGNED])
def test_addresses_are_aligned_as_torch_aligns_them(by: int) -> None:
    assert Address(torch.zeros(3)) % by == 0
    assert torch.zeros(3).data_ptr() % by == 0


ASKED: dict[str, Callable[[Any], Any]] = {
    "of another multiple": lambda address: address % 48,
    "beyond what is aligned": lambda address: address % 4096,
    "for a number": int,
    "for an index": operator.index,
    "if there is one": bool,
    "whether it is another": lambda address: address == Address(torch.zeros(3)),
    "as a key": hash,
}


@pytest.mark.parametrize("name", ASKED)
def test_whatever_else_is_asked_fails(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        ASKED[name](Address(torch.zeros(3)))
