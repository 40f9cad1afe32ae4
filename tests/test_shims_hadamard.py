"""The stand-ins for fast-hadamard-transform, against the definitions of its matrices."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.exporter.shims import _hadamard
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import fast_hadamard_transform
    import fast_hadamard_transform_cuda as extension
    from fast_hadamard_transform import fast_hadamard_transform_interface as package


def sylvester(n: int) -> Tensor:
    """Minus where an odd number of bits of both places are set."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=torch.float64
    )


def special(n: int) -> Tensor:
    return torch.tensor(_hadamard.matrix(n), dtype=torch.float64)


def expected(x: Tensor, multiple: int, size: int) -> Tensor:
    """x times the matrix of `size` rows in all, element for element."""
    outer = special(multiple) if multiple > 1 else torch.ones(1, 1, dtype=torch.float64)
    whole = torch.kron(outer, sylvester(size // multiple))
    return F.pad(x, (0, size - x.shape[-1])) @ whole.T[:, : x.shape[-1]]


# The first rows that the extension has, and some below.
ROWS = {
    12: {0: "+-++++++++++", 1: "--+-+-+-+-+-", 2: "+++-++----++", 11: "+-+--+-++---"},
    20: {0: "+----+----++--++-++-", 5: "-+++++-----+--+++--+", 19: "+--+--++------+----+"},
    28: {
        0: "+------++----++-+--+-+--++--",
        7: "--++++-+-------++--+++-+--+-",
        27: "++--++-+-++-+-+----++------+",
    },
    40: {
        0: "+-------------------" * 2,
        1: "++-++----+-+-++++--+" * 2,
        39: "+-++----+-+-++++--++-+--++++-+-+----++--",
    },
}


@pytest.mark.parametrize("n", _hadamard.MULTIPLES)
def test_the_other_matrices_are_hadamard_matrices_and_theirs(n: int) -> None:
    signs = special(n)
    assert torch.equal(signs @ signs.T, n * torch.eye(n, dtype=torch.float64))
    for row, theirs in ROWS[n].items():
        assert "".join("+" if sign > 0 else "-" for sign in signs[row].tolist()) == theirs


@pytest.mark.parametrize(
    ("n", "multiple", "size"),
    [(n, 1, 1 << (n - 1).bit_length()) for n in (1, 2, 3, 4, 8, 13, 64, 128, 200, 512)]
    + [(7, 12, 48), (48, 12, 48), (100, 12, 192), (80, 20, 80), (81, 20, 160)]
    + [(112, 28, 112), (448, 28, 448), (160, 40, 160), (33, 40, 160)],
)
def test_rows_are_multiplied(n: int, multiple: int, size: int) -> None:
    name = "" if multiple == 1 else f"_{multiple}N"
    x = torch.randn(2, 3, n, dtype=torch.float64, requires_grad=True)
    want = expected(x, multiple, size) * 0.25
    out = getattr(package, f"hadamard_transform{name}")(x, 0.25)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(
        getattr(extension, f"fast_hadamard_transform{name}")(x.mT.contiguous().mT, 0.25), want
    )
    cotangent = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, cotangent)
    (right,) = torch.autograd.grad(want, x, cotangent)
    torch.testing.assert_close(found, right)
    function = getattr(package, f"HadamardTransform{name[1:]}Fn")
    torch.testing.assert_close(function.apply(x, torch.tensor(0.25)), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(3, 192).to(dtype)
    calls: list[tuple[Callable[..., Tensor], int, int]] = [
        (fast_hadamard_transform.hadamard_transform, 1, 256),
        (package.hadamard_transform_12N, 12, 192),
    ]
    for call, multiple, size in calls:
        out = call(x, scale=0.1)
        assert out.dtype == dtype
        want = expected(x.double(), multiple, size) * 0.1
        within = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), want, rtol=within, atol=1e-5)


CODE = """
import math
import fast_hadamard_transform
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 16)
        self.down = nn.Linear(24, 3)

    def forward(self, x):
        turn = fast_hadamard_transform.hadamard_transform
        q = turn(self.up(x).contiguous(), scale=1 / math.sqrt(16))
        wide = turn(torch.cat([q, q[..., :8]], -1), 1.0 / torch.tensor(24).sqrt())
        return self.down(nn.functional.silu(wide))
"""


def test_a_model_that_turns_its_features_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {"up": torch.nn.Linear(5, 16), "down": torch.nn.Linear(24, 3)}
    checkpoint, model = saved_with(CODE, **parts)
    verified(
        tmp_path / "b", (checkpoint, model), ["x:[batch,length,5]"], ["fast_hadamard_transform"]
    )
