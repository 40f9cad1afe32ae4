"""Correlation: the definition, what the layers that it stands for compute, errors, NaN, threads."""

import itertools
import math
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops import OPS, register
from fuseport.ops.correlation import correlation
from fuseport.ops.correlation.cases import CASES, _Shape
from fuseport.ops.correlation.shapes import Options
from fuseport.ops.spec import Inputs

SPEC = OPS["correlation"]
CASE = {case.name: case for case in CASES}


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    assert register("correlation") == {"correlation": "native"}


def scalar(x1: Tensor, x2: Tensor, *options: int) -> Tensor:
    """The definition, a pair of pixels at a time."""
    o = Options(*options)
    (out,) = SPEC.operators[0](x1, x2, *options)
    out = torch.zeros_like(out)
    height, width = x1.shape[2:]
    for n, i, j, y, x in itertools.product(*map(range, out.shape)):
        for u, v in itertools.product(range(o.kernel_h), range(o.kernel_w)):
            p = y * o.stride_h - o.padding_h + u * o.dilation_h
            q = x * o.stride_w - o.padding_w + v * o.dilation_w
            down = (i - (o.patch_h - 1) // 2) * o.dilation_patch_h
            right = (j - (o.patch_w - 1) // 2) * o.dilation_patch_w
            rows, columns = range(height), range(width)
            if p in rows and p + down in rows and q in columns and q + right in columns:
                out[n, i, j, y, x] += x1[n, :, p, q] @ x2[n, :, p + down, q + right]
    return out


@pytest.mark.parametrize(
    "name",
    ["even_patch", "negative_padding", "stride_and_dilated_patch", "kernel_stride_padding"],
)
def test_the_definition(name: str) -> None:
    given = tuple(CASE[name].make(torch.float64, 2).values())
    (out,) = SPEC.operators[0](*given)
    torch.testing.assert_close(out, scalar(*given))


def test_options_of_one_number_or_a_pair() -> None:
    x1, x2 = torch.randn(2, 1, 3, 9, 8, dtype=torch.float64)
    one = correlation(x1, x2, 3, 5, 2, 1, 1, 2)
    pairs = correlation(x1, x2, (3, 3), (5, 5), (2, 2), (1, 1), (1, 1), (2, 2))
    assert torch.equal(one, pairs)
    assert one.shape == (1, 5, 5, 5, 4)
    down = correlation(x1, x2, patch_size=(3, 1), dilation_patch=(2, 1))
    torch.testing.assert_close(down[:, 2, 0, :-2], (x1[:, :, :-2] * x2[:, :, 2:]).sum(1))


@pytest.mark.parametrize(
    ("pad", "reach", "stride1", "stride2"), [(20, 20, 1, 2), (3, 3, 2, 1), (2, 4, 1, 2)]
)
def test_the_layer_of_flownet(pad: int, reach: int, stride1: int, stride2: int) -> None:
    """Both images padded, and a border left out that displacements cannot cross."""
    x1, x2 = torch.randn(2, 2, 4, 13, 15, dtype=torch.float64)
    first, second = (F.pad(t, [pad] * 4) for t in (x1, x2))
    steps = reach // stride2
    size = [n + 2 * pad - 2 * reach for n in x1.shape[2:]]
    planes = []
    for i, j in itertools.product(range(-steps, steps + 1), repeat=2):
        begin = [reach + i * stride2, reach + j * stride2]
        here = first[:, :, reach : reach + size[0], reach : reach + size[1]]
        there = second[:, :, begin[0] : begin[0] + size[0], begin[1] : begin[1] + size[1]]
        planes.append((here * there)[:, :, ::stride1, ::stride1].mean(1))
    out = correlation(
        x1, x2, 1, 2 * steps + 1, stride1, pad - reach, dilation_patch=stride2
    ).flatten(1, 2)
    torch.testing.assert_close(out / 4, torch.stack(planes, 1))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no stride": ({"stride": 0}, "stride_h must be 1 or more; got 0"),
    "no patch": ({"patch_size": (3, 0)}, "patch_w must be 1 or more; got 0"),
    "no output": ({"padding": -3}, "input1 must be so large that there is an output"),
    "too far": ({"dilation_patch": 2**31}, "dilation_patch_h must be 2147483647 or less"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options_are_refused(what: str) -> None:
    x1, x2 = torch.randn(2, 1, 3, 5, 6)
    changed, message = BAD[what]
    with pytest.raises(ValueError, match=f"fuseport::correlation: {message}"):
        correlation(x1, x2, **changed)


def test_images_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input2 must be input1's shape = \(1, 3, 5, 6\); got"):
        correlation(torch.randn(1, 3, 5, 6), torch.randn(1, 3, 5, 7))


def both(given: Inputs, dout: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients by kernels, and by the reference."""
    forward, backward = SPEC.operators
    values = tuple(given.values())
    mine = [*forward(*values), *backward(dout, *values)]
    out, gradients = forward.reference(*values), backward.reference(dout, *values)
    assert isinstance(out, Tensor)
    return mine, [out, *gradients]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", ["input1", "input2", "dout"])
@pytest.mark.parametrize(
    "shape",
    [
        _Shape(),
        _Shape(c=9, image=(9, 21), patch=(9, 9), padding=(3, 4)),
        _Shape(image=(9, 11), stride=(2, 3), patch=(5, 5), padding=(-1, 1)),
        _Shape(kernel=(2, 1), stride=(3, 2), image=(12, 9), patch=(4, 4)),
    ],
)
def test_what_is_no_number_goes_where_its_pairs_are(
    shape: _Shape, tensor: str, value: float
) -> None:
    """A pixel outside is no zero that something is multiplied with, nor is one of no window."""
    inputs = shape.make(torch.float32, 3)
    dout = torch.randn(SPEC.operators[0](*inputs.values())[0].shape)
    flat = (dout if tensor == "dout" else inputs[tensor]).view(-1)
    for at in (0, len(flat) // 2, len(flat) - 1):
        flat[at] = value
    for number, (mine, plain) in enumerate(zip(*both(inputs, dout), strict=True)):
        for kind in (Tensor.isnan, Tensor.isposinf, Tensor.isneginf):
            assert torch.equal(kind(mine), kind(plain)), (number, kind)


def test_bits_do_not_depend_on_threads() -> None:
    inputs = CASE["many_units"].make(torch.float32, 1)
    dout = torch.randn(SPEC.operators[0](*inputs.values())[0].shape)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(both(inputs, dout)[0])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


LESSER_ISAS = """
import os, traceback, torch
from fuseport.ops import OPS, register
register("correlation")
forward, backward = OPS["correlation"].operators

def compare(case, dtype):
    given = tuple(case.make(dtype, 0).values())
    dout = torch.randn_like(forward(*given)[0])
    found = *forward(*given), *backward(dout, *given)
    plain = forward.reference(*given), *backward.reference(dout, *given)
    for got, wanted in zip(found, plain):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

for isa in ("baseline", "avx2"):  # which a process chooses once: each in a fork, before it has
    if (child := os.fork()) == 0:
        os.environ["FUSEPORT_ISA"] = isa
        try:
            for case in OPS["correlation"].cases:
                for dtype in (torch.float32, torch.float64):
                    compare(case, dtype)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, isa
"""


def test_lesser_instruction_sets_compute_the_same(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    done = run_python(LESSER_ISAS)
    assert done.returncode == 0, done.stderr
