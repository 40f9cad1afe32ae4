"""The gradient of value of deformable attention on CUDA: gathered from samples that are sorted.

`cuda_on_cpu/` stands in for the GPU; where there is one, it sorts, too.
"""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.ms_deform_attn import SPEC
from fuseport.ops.spec import Inputs, as_tuple
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import Device

GRADIENT = SPEC.operator("ms_deform_attn_backward")
CASE = {case.name: case for case in SPEC.cases}


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in.device(SPEC) as found:
        yield found


def inputs_of_gradient(name: str) -> Inputs:
    inputs = CASE[name].make(torch.float32, 1)
    return stand_in.cotangents_of(SPEC, SPEC.operators[0], inputs, 2) | inputs


def at_centres(queries: int) -> tuple[list[Tensor], Tensor]:
    """Samples at pixels' centres, a fifth of them outside, whose gradient is a sum of rows of dout.

    Also that gradient, with rows in the order of queries: a warp has one row at a time.
    """
    generator = torch.Generator().manual_seed(queries)
    heads, channels, height, width = 2, 128, 2, 4
    pixels = torch.randint(-2, height * width, (queries, heads), generator=generator)
    x, y = pixels % width, pixels.div(width, rounding_mode="floor")  # -1 is outside
    places = torch.stack(((x + 0.5) / width, (y + 0.5) / height), -1)
    scale = 10.0 ** torch.randint(-4, 4, (queries, 1), generator=generator)
    dout = torch.randn(1, queries, heads * channels, generator=generator) * scale
    dvalue = torch.zeros(1, height * width, heads, channels)
    for query, of_heads in enumerate(pixels.tolist()):
        for head, pixel in enumerate(of_heads):
            if pixel >= 0:
                dvalue[0, pixel, head] += dout[0, query].view(heads, channels)[head]
    given = [
        dout,
        torch.ones_like(dvalue),
        torch.tensor([[height, width]]),
        torch.tensor([0]),
        places.view(1, queries, heads, 1, 1, 2),
        torch.ones(1, queries, heads, 1, 1),
    ]
    return given, dvalue


@pytest.mark.parametrize("order", [0, 1, 2])
def test_samples_of_a_cell_are_added_up_in_their_order(device: Device, order: int) -> None:
    """To the bit; what is outside comes after all of them."""
    given, dvalue = at_centres(70)
    device.order(order)
    assert torch.equal(device(GRADIENT, *given)[0], dvalue)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("queries", [70, 5000, 40000])
def test_a_gpu_adds_them_up_in_their_order(queries: int) -> None:
    """Of one block, of one pass, of many blocks."""
    registration.ensure(SPEC)
    given, dvalue = at_centres(queries)
    found = as_tuple(GRADIENT(*(t.cuda() for t in given)))[0]
    assert torch.equal(found.cpu(), dvalue)


@pytest.mark.parametrize("pairs_at_once", [1, 3, 4])
@pytest.mark.parametrize("name", ["plain", "overlapping_levels", "empty_level", "far_outside"])
def test_slices_change_no_bit(device: Device, name: str, pairs_at_once: int) -> None:
    given = inputs_of_gradient(name)
    expected = device(GRADIENT, *given.values())
    b, s, h, c = given["value"].shape
    q, levels, points = (given["sampling_locations"].shape[i] for i in (1, 3, 4))
    found = [torch.full_like(t, torch.nan) for t in expected]
    tensors = (*given.values(), *found)
    in_slices = stand_in.host(SPEC, "slices.cpp").backward_in_slices
    in_slices.restype = ctypes.c_char_p
    sizes = (ctypes.c_int64 * 7)(b, s, h, c, q, levels, points)
    places = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    assert in_slices(sizes, places, ctypes.c_int64(pairs_at_once)) is None
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_more_samples_than_31_bits_count_are_refused(device: Device) -> None:
    """Cells, here: of 2^15 levels, each of which may have 2^15 pixels."""
    many = 2**15
    levels = torch.zeros(many, 3, dtype=torch.int64)
    weights = torch.ones(1, 1, 1, many, 1)
    given = (torch.ones(1, many, 1, 1), levels[:, :2], levels[:, 2], torch.ones(*weights.shape, 2))
    with pytest.raises(ValueError, match="sampling_locations must be of fewer samples and levels"):
        device(GRADIENT, torch.ones(1, 1, 1), *given, weights)
