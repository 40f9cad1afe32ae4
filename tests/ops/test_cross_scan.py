"""Walks over an image and their sum: the order of pixels, what VMamba does, public errors."""

import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuseport.ops.cross_merge import cross_merge
from fuseport.ops.cross_scan import cross_scan


def walks(height: int, width: int) -> list[list[tuple[int, int]]]:
    by_rows = [(h, w) for h in range(height) for w in range(width)]
    by_columns = [(h, w) for w in range(width) for h in range(height)]
    return [by_rows, by_columns, by_rows[::-1], by_columns[::-1]]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (17, 18)])
def test_walks_visit_pixels_in_their_order(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width)
    out = cross_scan(x)
    for k, walk in enumerate(walks(height, width)):
        assert torch.equal(out[:, k], torch.stack([x[:, :, h, w] for h, w in walk], 2))


def test_sum_takes_each_walk_back_to_its_pixels() -> None:
    ys = torch.randn(2, 4, 3, 5 * 4, dtype=torch.float64)
    expected = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for k, walk in enumerate(walks(5, 4)):
        for t, (h, w) in enumerate(walk):
            expected[:, :, h, w] += ys[:, k, :, t]
    torch.testing.assert_close(cross_merge(ys, 5, 4), expected.flatten(2))


def vmamba_merge(ys: Tensor) -> Tensor:
    """As VMamba's vmamba.py states it, over ys of (B, K, D, H, W)."""
    b, k, d, h, w = ys.shape
    flat = ys.view(b, k, d, -1)
    pairs = flat[:, 0:2] + flat[:, 2:4].flip(dims=[-1]).view(b, 2, d, -1)
    turned = pairs[:, 1].view(b, -1, w, h).transpose(dim0=2, dim1=3).contiguous()
    return pairs[:, 0] + turned.view(b, d, -1)


@pytest.mark.parametrize("size", [(7, 7), (14, 14), (18, 33)])
def test_merge_is_that_of_vmamba(size: tuple[int, int]) -> None:
    ys = torch.randn(2, 4, 5, *size)
    assert torch.equal(cross_merge(ys), vmamba_merge(ys))
    assert torch.equal(cross_merge(ys.flatten(3), *size), vmamba_merge(ys))


def test_each_is_the_others_gradient() -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    ys = torch.randn(2, 4, 3, 20, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(cross_scan(x), x, ys.detach())
    assert torch.equal(dx.flatten(2), cross_merge(ys, 5, 4))
    (dys,) = torch.autograd.grad(cross_merge(ys, 5, 4), ys, x.detach().flatten(2))
    assert torch.equal(dys, cross_scan(x))


def test_merge_of_walks_is_four_times_the_image_in_every_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(2, 3, 19, 20).to(dtype)
        assert torch.equal(cross_merge(cross_scan(x), 19, 20), 4 * x.flatten(2))


def test_bits_that_are_no_numbers_are_moved_as_they_are() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(1, 1, 256, 256)
    out = cross_scan(bits.view(torch.float16)).view(torch.int16)
    assert torch.equal(out[0, 3, 0].flip(0).view(256, 256).mT, bits[0, 0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.zeros(2, 4, 3, 20),), "height, width must be given"),
        ((torch.zeros(2, 4, 3, 20), 5), "height, width must be given"),
        ((torch.zeros(2, 4, 3, 20), 5, 5), r"ys must be \(b, 4, C, height \* width\)"),
        ((torch.zeros(2, 4, 3, 5, 4), 4, 5), "height must be 5"),
        ((torch.zeros(2, 4, 3, 5, 4), None, 5), "width must be 4"),
        ((torch.zeros(2, 3, 3, 20), 5, 4), r"ys must be \(b, 4, C, H, W\)"),
        ((torch.zeros(2, 3),), "ys must be"),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments: tuple[Tensor, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        cross_merge(*arguments)


def test_of_an_exported_program_height_and_width_stay_open() -> None:
    class Both(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return cross_merge(2 * cross_scan(x), x.shape[2], x.shape[3])

    auto = torch.export.Dim.AUTO
    example = (torch.randn(2, 3, 5, 7),)
    shapes = ({0: auto, 1: auto, 2: auto, 3: auto},)
    program = torch.export.export(Both(), example, dynamic_shapes=shapes).module()
    x = torch.randn(3, 2, 9, 4)
    assert torch.equal(program(x), 8 * x.flatten(2))


def test_a_lesser_instruction_set_gives_the_same_bits(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    """Numbers are moved, and added in one order."""
    code = """
import torch
from fuseport.ops import OPS, register
register("cross_scan", "cross_merge")
for name in ("cross_scan", "cross_merge"):
    spec = OPS[name]
    for case in spec.cases:
        operator = spec.operator(case.operator)
        for dtype in case.dtypes:
            given = case.make(dtype, 0)
            (found,) = operator(*given.values())
            assert torch.equal(found, operator.reference(*given.values())), (name, case.name)
print("same")
"""
    done = run_python(code, FUSEPORT_ISA="baseline")
    assert done.stdout == "same\n", done.stderr
