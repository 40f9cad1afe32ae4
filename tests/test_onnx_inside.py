"""What ONNX has no operator of, in the branches of a condition and in the turns of a loop."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan

from fuseport.tests.test_onnx_plain import RESAMPLING, assert_holds


def _masked(x: Tensor) -> Tensor:
    """From the third row of each picture on nothing may be looked at."""
    rows = torch.arange(x.shape[-2])
    allowed = (rows[:, None] < 3) & (rows <= rows[:, None])
    return F.scaled_dot_product_attention(x, x.cos(), x, attn_mask=allowed)


def _class_of_each(x: Tensor) -> Tensor:
    return F.cross_entropy(x, x.argmax(1)) * x.sin()


INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": _masked,
    "loss of a volume": _class_of_each,
    "mean": RESAMPLING["adaptive mean"],
    "mean by another divisor": RESAMPLING["mean by another divisor"],
    "nearest": RESAMPLING["nearest to a size"],
    "cut": lambda x: F.pad(x, (-1, 2, 1, -1)) * 2,
    "SiLU and Mish": lambda x: F.silu(x) * F.mish(x),
    "booleans": lambda x: F.relu(x * (x > 0.3).cumsum(-1)),
    "rows by a vector": lambda x: x @ x[0, 0, 0] + (x * 3).sigmoid().sum(-1),
}


@pytest.mark.parametrize("name", INSIDE)
def test_branches(name: str, tmp_path: Path) -> None:
    def chosen(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        both = function, lambda x: function(x * 0.5)
        return torch.cond(x.sum() > 0, *both, (x,)) + torch.cond(x.sum() > 0, *both[::-1], (x,))

    assert_holds(partial(chosen, INSIDE[name]), tmp_path)


@pytest.mark.parametrize("name", INSIDE)
def test_turns(name: str, tmp_path: Path) -> None:
    def turned(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def turn(state: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
            state = state * 0.5 + picture
            return state, function(state[None])[0]

        return scan(turn, x[0] * 0, x)[1]

    assert_holds(partial(turned, INSIDE[name]), tmp_path)


def _transformed(x: Tensor) -> Tensor:
    waves = torch.fft.rfft(x, dim=2)
    return torch.fft.irfft(waves * waves.abs(), n=x.shape[2], dim=2) + waves.angle().mean()


@pytest.mark.parametrize("chosen", [False, True])
def test_transforms(chosen: bool, tmp_path: Path) -> None:
    """In a condition, they are of an older version of the operators."""

    def function(x: Tensor) -> Tensor:
        def other(x: Tensor) -> Tensor:
            return _transformed(x * 0.5)

        return torch.cond(x.sum() > 0, *((_transformed, other)[:: 1 if chosen else -1]), (x,))

    assert_holds(function, tmp_path)
