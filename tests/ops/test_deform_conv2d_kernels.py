"""The kernels of deformable convolution: gradients, NaN and Inf, errors, threads, instructions."""

import math
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuseport.ops import OPS, register
from fuseport.ops.deform_conv2d import deform_conv2d
from fuseport.ops.deform_conv2d.cases import CASES, _Shape
from fuseport.ops.spec import Inputs

SPEC = OPS["deform_conv2d"]
CASE = {case.name: case for case in CASES}
# Several tiles of outputs, and channels of two blocks in one group.
WIDE = _Shape(1, 68, 4, (11, 8), (2, 2), reach=2.0)


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    assert register("deform_conv2d") == {"deform_conv2d": "native"}


def both(inputs: Inputs, dout: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients by kernels, and by the reference."""
    operator = SPEC.operator("deform_conv2d_modulated" if "mask" in inputs else "deform_conv2d")
    assert operator.backward is not None
    backward = SPEC.operator(operator.backward)
    given = tuple(inputs.values())
    (out,) = operator(*given)
    dout = torch.randn_like(out) if dout is None else dout
    plain = [operator.reference(*given), *backward.reference(dout, *given)]
    return [out, *backward(dout, *given)], plain


def assert_no_numbers_are_where_they_are_in_plain_torch(
    inputs: Inputs, dout: Tensor | None = None
) -> None:
    kinds = (Tensor.isnan, Tensor.isposinf, Tensor.isneginf)
    for number, (mine, plain) in enumerate(zip(*both(inputs, dout), strict=True)):
        for kind in kinds:
            assert torch.equal(kind(mine), kind(plain)), (number, kind)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["input", "offset", "mask", "weight", "bias", "dout"])
@pytest.mark.parametrize("shape", [_Shape(), WIDE, _Shape(c=12, groups=2, offset_groups=3)])
def test_nan_and_inf_spread_as_in_the_reference(shape: _Shape, tensor: str, value: float) -> None:
    inputs = shape.make(torch.float32, 3)
    dout = torch.randn(SPEC.operators[1](*inputs.values())[0].shape)
    flat = (dout if tensor == "dout" else inputs[tensor]).view(-1)
    flat[len(flat) // 2] = value
    assert_no_numbers_are_where_they_are_in_plain_torch(inputs, dout)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_counts_where_its_sample_is_outside(value: float) -> None:
    """Zero times it is no number; and a sample has its own value, of whatever pixels, before it."""
    inputs = _Shape(padding=(0, 0), image=(6, 6)).make(torch.float32, 3)
    inputs["offset"].zero_()
    inputs["offset"][:, :2, 0, 0] = -9.0
    inputs["mask"][:, :2, 0] = value
    assert_no_numbers_are_where_they_are_in_plain_torch(inputs)
    assert SPEC.operators[1](*inputs.values())[0][:, :, 0, 0].isnan().all()


def test_offsets_that_are_no_numbers_or_far_away_take_nothing() -> None:
    inputs = WIDE.make(torch.float32, 3)
    for column, value in enumerate((math.nan, math.inf, -math.inf, 1e30)):
        inputs["offset"][..., column] = value
    inputs["input"][:, :, 0, 0] = math.nan  # a pixel that none of these may be mistaken for
    (out,) = SPEC.operators[1](*inputs.values())
    assert torch.equal(out[..., :4], inputs["bias"][:, None, None].expand_as(out[..., :4]))
    assert_no_numbers_are_where_they_are_in_plain_torch(inputs)


@pytest.mark.parametrize("reach", [0.0, 1.0])
def test_samples_at_the_centres_of_pixels(reach: float) -> None:
    """Where offsets are whole numbers, and where they jump beside: gradients are those of there."""
    inputs = WIDE.make(torch.float32, 5)
    inputs["offset"] = inputs["offset"].round() * reach
    for mine, plain in zip(*both(inputs), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["modulated", "plain", "groups_across_offset_groups", "stride"])
def test_gradients_by_autograd_are_the_slopes(name: str) -> None:
    given = CASE[name].make(torch.float64, 4)
    pairs = ("stride", "padding", "dilation")
    options = {key: (given[f"{key}_h"], given[f"{key}_w"]) for key in pairs}
    x, offset, weight, bias = (
        given[key].requires_grad_() for key in ("input", "offset", "weight", "bias")
    )
    mask = given["mask"].requires_grad_() if "mask" in given else None

    def run(*tensors: Tensor) -> Tensor:
        return deform_conv2d(*tensors[:4], **options, mask=tensors[4] if mask is not None else None)

    leaves = (x, offset, weight, bias) if mask is None else (x, offset, weight, bias, mask)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    (slope,) = torch.autograd.grad(run(*leaves).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        slope.sum().backward()


def test_bits_do_not_depend_on_threads_or_on_the_rest_of_a_batch() -> None:
    shape = _Shape(3, 132, 8, (35, 33), (2, 2), groups=2, offset_groups=2)
    inputs = shape.make(torch.float32, 5)
    known, threads = both(inputs, dout := torch.randn(3, 8, 36, 34))[0], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for one, other in zip(both(inputs, dout)[0], known, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)
    alone = {k: v[1:2] if k in ("input", "offset", "mask") else v for k, v in inputs.items()}
    for one, other in zip(both(alone, dout[1:2])[0][:4], known, strict=False):
        assert torch.equal(one, other[1:2])


BAD = {
    "no stride": ("stride_w", 0, "stride_w must be 1 or more; got 0"),
    "a wide padding": ("padding_h", 2**31, r"padding_h must be 2\^31 - 1 or less; got 2147483648"),
    "no output": ("dilation_h", 9, r"input must be so large that there is an output; got \(5, 4\)"),
    "three dimensions": ("input", torch.zeros(2, 4, 5), r"input must be \(b, c, H, W\); got \(2,"),
    "an integer": ("input", torch.zeros(2, 4, 5, 4, dtype=torch.int64), "input must be float16,"),
    "another dtype": ("offset", torch.zeros(1).double(), "offset must be float32; got float64"),
    "no filter": ("weight", torch.zeros(6, 4, 0, 3), r"of kh and kw 1 or more; got \(0, 3\)"),
    "no divisor": ("weight", torch.zeros(6, 3, 3, 3), "of groups that divide 4 channels; got 3"),
    "odd outputs": ("weight", torch.zeros(5, 2, 3, 3), "of channels that 2 groups divide; got 5"),
    "a short bias": ("bias", torch.zeros(5), r"bias must be \(o,\) = \(6,\); got \(5,\)"),
    "half a pair": ("offset", torch.zeros(2, 9, 5, 4), "of a multiple of 18 channels; got 9"),
    "too many groups": ("offset", torch.zeros(2, 54, 5, 4), "groups that divide 4 channels; got 3"),
    "a mask too small": ("mask", torch.zeros(2, 9, 4, 4), r"mask must be \(b, G\*kh\*kw, oh, ow\)"),
    "too many pixels": (
        "input",
        torch.zeros(1).expand(2, 4, 2**16, 2**16),
        r"at most 2\^31 - 1 pixels",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs_are_refused_as_by_the_reference(what: str) -> None:
    name, wrong, message = BAD[what]
    inputs = {**_Shape().make(torch.float32, 0), name: wrong}
    if what == "too many pixels":  # and nothing else is wrong
        inputs |= {f"stride_{axis}": 2**15 for axis in "hw"}
        inputs |= {k: torch.zeros(2, n, 2, 2) for k, n in (("offset", 18), ("mask", 9))}
    said = []
    for operator, given in ((SPEC.operators[1], ()), (SPEC.operators[3], (torch.zeros(1),))):
        for run in (operator, operator.reference):
            with pytest.raises(ValueError, match=message) as caught:
                run(*given, *inputs.values())
            said.append(str(caught.value).replace("_backward", ""))
    assert len(set(said)) == 1


def test_a_cotangent_of_another_shape_is_refused() -> None:
    inputs = _Shape().make(torch.float32, 0)
    backward = SPEC.operators[3]
    for run in (backward, backward.reference):
        with pytest.raises(ValueError, match=r"dout must be \(b, o, oh, ow\) = \(2, 6, 5, 4\)"):
            run(torch.zeros(2, 6, 5, 5), *inputs.values())


LESSER_ISAS = """
import os, traceback, torch
from fuseport.ops import OPS, register
register("deform_conv2d")
spec = OPS["deform_conv2d"]

def compare(case, dtype):
    inputs = tuple(case.make(dtype, 0).values())
    operator = spec.operator(case.operator)
    backward = spec.operator(operator.backward)
    dout = torch.randn_like(operator(*inputs)[0])
    found = *operator(*inputs), *backward(dout, *inputs)
    plain = operator.reference(*inputs), *backward.reference(dout, *inputs)
    for got, wanted in zip(found, plain):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

for isa in ("baseline", "avx2"):  # which a process chooses once: each in a fork, before it has
    if (child := os.fork()) == 0:
        os.environ["FUSEPORT_ISA"] = isa
        try:
            for case in spec.cases:
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
