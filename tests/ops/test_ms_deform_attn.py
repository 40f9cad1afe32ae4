"""Deformable attention: the definition, transformers' own computation, levels as data."""

import math
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.deformable_detr import modeling_deformable_detr

from fuseport.ops import OPS, register
from fuseport.ops.ms_deform_attn import ms_deform_attn
from fuseport.ops.ms_deform_attn.cases import CASES
from fuseport.ops.spec import Inputs

CASE = {case.name: case for case in CASES}


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    assert register("ms_deform_attn") == {"ms_deform_attn": "native"}


def scalar(given: Inputs) -> Tensor:
    """The definition, one pixel at a time."""
    value, shapes, starts, locations, weights = given.values()
    b, _, h, c = value.shape
    q, levels, points = (locations.shape[i] for i in (1, 3, 4))
    out = torch.zeros(b, q, h, c, dtype=torch.float64)
    for index in torch.cartesian_prod(*map(torch.arange, (b, q, h, levels, points))).tolist():
        i, at, head, level, _ = index
        height, width = shapes[level].tolist()
        x, y = (locations[tuple(index)].double() * torch.tensor([width, height]) - 0.5).tolist()
        for row in range(height):
            for column in range(width):
                share = max(0.0, 1 - abs(x - column)) * max(0.0, 1 - abs(y - row))
                pixel = value[i, int(starts[level]) + row * width + column, head].double()
                out[i, at, head] += float(weights[tuple(index)]) * share * pixel
    return out.flatten(2)


@pytest.mark.parametrize("name", ["plain", "gaps", "overlapping_levels", "empty_level", "one_row"])
def test_the_definition(name: str) -> None:
    given = CASE[name].make(torch.float64, 3)
    torch.testing.assert_close(ms_deform_attn(*given.values()), scalar(given))


@pytest.mark.parametrize("name", ["plain", "four_levels", "many_units", "one_row", "all_within"])
def test_values_and_gradients_of_transformers(name: str) -> None:
    given = CASE[name].make(torch.float64, 1)
    value, shapes = given["value"], given["value_spatial_shapes"]
    given["value"] = value[:, : int(shapes.prod(1).sum())]  # it wants no position but the levels'
    floating = ("value", "sampling_locations", "attention_weights")
    cotangent = torch.randn_like(ms_deform_attn(*given.values()))

    def differentiated(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = {k: v.clone().requires_grad_(k in floating) for k, v in given.items()}
        out = run(*leaves.values())
        return out, *torch.autograd.grad(out, [leaves[name] for name in floating], cotangent)

    def plain(value: Tensor, *rest: Tensor) -> Tensor:
        module = modeling_deformable_detr.MultiScaleDeformableAttention()
        return module(value, shapes, [tuple(s) for s in shapes.tolist()], *rest[1:], 64)

    for mine, theirs in zip(differentiated(ms_deform_attn), differentiated(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_samples_at_the_centres_of_pixels_are_the_pixels() -> None:
    """Where reference points of encoders are; the gradient there is that of plain torch too."""
    height, width = 5, 7
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    centres = torch.stack(((x + 0.5) / width, (y + 0.5) / height), -1).reshape(1, -1, 1, 1, 1, 2)
    value = torch.randn(1, height * width, 1, 16)
    given = (value, torch.tensor([[height, width]]), torch.tensor([0]))
    weights = torch.ones(centres.shape[:-1])
    out = ms_deform_attn(*given, centres, weights)
    torch.testing.assert_close(out, value.flatten(2), atol=1e-5, rtol=1e-5)
    gradient = OPS["ms_deform_attn"].operator("ms_deform_attn_backward")
    mine, plain = (run(out, *given, centres, weights) for run in (gradient, gradient.reference))
    torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


def test_what_is_outside_or_no_number_is_not_seen() -> None:
    given = CASE["plain"].make(torch.float32, 0)
    locations = given["sampling_locations"]
    locations[0, 0] = math.nan
    locations[0, 1] = math.inf
    locations[0, 2] = -1e30
    given["value"][:, 0] = math.nan  # a pixel that none of these may be mistaken for
    out = ms_deform_attn(*given.values())
    assert not out[0, :3].any()
    backward = OPS["ms_deform_attn"].operator("ms_deform_attn_backward")
    _, dlocations, dweights = backward(torch.ones_like(out), *given.values())
    assert not dlocations[0, :3].any()
    assert not dweights[0, :3].any()


BAD = {
    "a level of negative height": ([[-3, -4], [2, 1]], [0, 12], r"shapes\[0\] .* got \(-3, -4\)"),
    "a level that begins before value": ([[3, 4], [2, 1]], [0, -1], r"index\[1\] .* got -1"),
    "a level that ends after value": ([[3, 4], [2, 1]], [0, 13], r"index\[1\] .* 14; got 13"),
    "a level larger than value": ([[3, 5], [2, 1]], [0, 0], r"index\[0\] .* 3 x 5 .* got 0"),
    "sizes whose product overflows": ([[2**40, 2**40], [1, 1]], [0, 0], r"shapes\[0\]"),
    "a product beyond 32 bits": ([[2**31 - 1, 2**31 - 1], [1, 1]], [0, 0], r"index\[0\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_levels_that_are_not_within_value_are_refused(what: str) -> None:
    shapes, starts, message = BAD[what]
    given = CASE["plain"].make(torch.float32, 0)
    given["value_spatial_shapes"] = torch.tensor(shapes)
    given["value_level_start_index"] = torch.tensor(starts)
    said = []
    spec = OPS["ms_deform_attn"]
    dout = torch.zeros(2, 5, 16)
    for name, inputs in (("ms_deform_attn", ()), ("ms_deform_attn_backward", (dout,))):
        operator = spec.operator(name)
        for run in (operator, operator.reference):
            with pytest.raises(ValueError, match=message) as caught:
                run(*inputs, *given.values())
            said.append(str(caught.value).replace("_backward", ""))
    assert len(set(said)) == 1


LESSER_ISAS = """
import os, traceback, torch
from fuseport.ops import OPS, register
register("ms_deform_attn")
operator, gradient = OPS["ms_deform_attn"].operators

def compare(inputs):
    dout = torch.randn_like(operator(*inputs)[0])
    for run, given in ((operator, inputs), (gradient, (dout, *inputs))):
        plain = run.reference(*given)
        plain = (plain,) if isinstance(plain, torch.Tensor) else plain
        for got, wanted in zip(run(*given), plain):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

for isa in ("baseline", "avx2"):  # which a process chooses once: each in a fork, before it has
    if (child := os.fork()) == 0:
        os.environ["FUSEPORT_ISA"] = isa
        try:
            for case in OPS["ms_deform_attn"].cases:
                for dtype in (torch.float32, torch.float64) if "channels" in case.name else ():
                    compare(tuple(case.make(dtype, 0).values()))
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
