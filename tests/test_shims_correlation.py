"""The stand-ins for extensions of optical flow and stereo, against their definitions in loops."""

import itertools
from collections.abc import Callable
from math import ceil, floor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.exporter.program.conditions import violated
from fuseport.tests.test_program import (
    SEQUENCE,
    assert_same,
    captured,
    cotangents_of,
    eager,
    inputs_of,
)

with shims.installed(shims.SHIMS):
    import alt_cuda_corr
    import channelnorm_cuda
    import corr_sampler
    import correlation_cuda
    import resample2d_cuda
    import spatial_correlation_sampler_backend
    from correlation_package.modules.corr import Correlation, Correlation1d
    from spatial_correlation_sampler import (
        SpatialCorrelationSampler,
        SpatialCorrelationSamplerFunction,
        spatial_correlation_sample,
    )


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def at(x: Any, *place: int) -> Any:
    """Of an array (c, h, w): zero outside."""
    y, z = place
    inside = 0 <= y < x.shape[1] and 0 <= z < x.shape[2]
    return x[:, y, z] if inside else np.zeros(x.shape[0])


def differentiates(
    forward: Callable[..., Tensor], given: Callable[..., Any], *inputs: Tensor
) -> None:
    """The forward's gradient is right, and `given`, of a cotangent, gives it, too."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(forward, leaves, fast_mode=True)
    out = forward(*leaves)
    cotangent = drawn(*out.shape, seed=9)
    expected = torch.autograd.grad(out, leaves, cotangent)
    for found, wanted in zip(given(cotangent), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_sampler_of_clement_pinard() -> None:
    one, two = drawn(2, 3, 6, 7), drawn(2, 3, 6, 7, seed=1)
    sizes = ((2, 3), (3, 5), (2, 1), (1, 2), (2, 1), (1, 2))
    (kh, kw), (ph, pw), (sh, sw), (ah, aw), (dh, dw), (gh, gw) = sizes
    expected = np.zeros((2, ph, pw, (6 + 2 * ah - (kh - 1) * dh - 1) // sh + 1, 7 + 2 * aw - 2))
    for b, i, j, y, x in np.ndindex(*expected.shape):
        for u, v in itertools.product(range(kh), range(kw)):
            place = (y * sh - ah + u * dh, x * sw - aw + v * dw)
            moved = (place[0] + (i - ph // 2) * gh, place[1] + (j - pw // 2) * gw)
            expected[b, i, j, y, x] += at(one[b].numpy(), *place) @ at(two[b].numpy(), *moved)
    wanted = torch.from_numpy(expected)
    torch.testing.assert_close(spatial_correlation_sample(one, two, *sizes), wanted)
    torch.testing.assert_close(SpatialCorrelationSamplerFunction.apply(one, two, *sizes), wanted)
    torch.testing.assert_close(SpatialCorrelationSampler(*sizes)(one, two), wanted)
    backend = (kh, kw, ph, pw, ah, aw, dh, dw, gh, gw, sh, sw)
    small = (one[:1, :2, :4, :4].contiguous(), two[:1, :2, :4, :4].contiguous())
    differentiates(
        lambda a, b: spatial_correlation_sampler_backend.forward(a, b, *backend),
        lambda g: spatial_correlation_sampler_backend.backward(*small, g, *backend),
        *small,
    )


def flownets(
    one: Tensor, two: Tensor, pad: int, kernel: int, most: int, s1: int, s2: int, corner: bool
) -> Tensor:
    """FlowNet's correlation by its definition, over inputs within a frame of zeros.

    Args:
        corner: windows have their upper left corner where others have their centre.
    """
    framed = [np.pad(x.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad))) for x in (one, two)]
    half = (kernel - 1) // 2
    steps = range(-(most // s2) * s2, most + 1, s2)
    sizes = [ceil((size - 2 * (half + most)) / s1) for size in framed[0].shape[2:]]
    window = range(kernel) if corner else range(-half, half + 1)
    expected = np.zeros((len(one), len(steps) ** 2, *sizes))
    for b, y, x in np.ndindex(len(one), *sizes):
        for k, (dy, dx) in enumerate(itertools.product(steps, steps)):
            for u, v in itertools.product(window, window):
                row, column = y * s1 + most + u, x * s1 + most + v
                assert min(row + dy, column + dx) >= 0
                products = framed[0][b, :, row, column] @ framed[1][b, :, row + dy, column + dx]
                expected[b, k, y, x] += products / (kernel**2 * one.shape[1])
    return torch.from_numpy(expected)


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 1, 4, 1, 2),  # FlowNetC's, smaller
        (1, 1, 3, 2, 1),  # a frame narrower than displacements
        (0, 1, 2, 3, 1),
        (2, 3, 3, 1, 2),
        (4, 3, 3, 2, 2),
        (3, 2, 2, 1, 1),
    ],
)
def test_flownets_correlation(sizes: tuple[int, ...]) -> None:
    one, two = drawn(2, 3, 9, 8), drawn(2, 3, 9, 8, seed=1)

    def forward(a: Tensor, b: Tensor) -> Tensor:
        output = a.new_empty(0)
        correlation_cuda.forward(a, b, a.new_empty(0), b.new_empty(0), output, *sizes, 1)
        return output

    torch.testing.assert_close(forward(one, two), flownets(one, two, *sizes, corner=False))
    small = (one[:1, :1].contiguous(), two[:1, :1].contiguous())

    def backward(cotangent: Tensor) -> list[Tensor]:
        found = [x.new_empty(0) for x in small]
        scratch = (one.new_empty(0), one.new_empty(0))
        correlation_cuda.backward(*small, *scratch, cotangent, *found, *sizes, 1)
        return found

    differentiates(forward, backward, *small)


def test_flownets_correlation_refuses_what_reads_past_its_inputs() -> None:
    x = drawn(1, 2, 8, 8)
    scratch = [x.new_empty(0) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="kernel_size 3 with max_displacement 4"):
        correlation_cuda.forward(x, x, *scratch, 4, 3, 4, 1, 2, 1)
    with pytest.raises(ValueError, match="1 or more"):
        correlation_cuda.forward(x, x, *scratch, 4, 0, 4, 1, 2, 1)


def test_flownets_correlation_of_halves_sums_beyond_what_they_hold() -> None:
    x = torch.full((1, 4, 3, 3), 200, dtype=torch.float16)
    output = x.new_empty(0)
    correlation_cuda.forward(x, x, x.new_empty(0), x.new_empty(0), output, 0, 1, 0, 1, 1, 1)
    assert output.dtype == torch.float16
    assert (output == 40000).all()


class Correlated(torch.nn.Module):
    """As FlowNet2's `CorrelationFunction` calls it."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, None], x.sin()[:, None]
        scratch, output = (a.new(), b.new()), a.new()
        correlation_cuda.forward(a, b, *scratch, output, 2, 1, 2, 1, 1, 1)
        return output.flatten(1, 2)


def test_an_output_is_given_its_size_in_a_capture() -> None:
    forward, gradient = captured(Correlated())
    for sizes in ({"batch": 1, "length": 1}, {"batch": 3, "length": 7}):
        assert not violated(forward, sizes)
        inputs = inputs_of(SEQUENCE, sizes)
        cotangents = cotangents_of(Correlated(), inputs)
        expected = eager(Correlated(), inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)


@pytest.mark.parametrize("sizes", [(2, 1, 2, 1, 1), (3, 3, 3, 2, 2), (1, 3, 2, 1, 1)])
def test_pwc_nets_correlation_package(sizes: tuple[int, ...]) -> None:
    one, two = drawn(2, 3, 9, 8), drawn(2, 3, 9, 8, seed=1)
    torch.testing.assert_close(
        Correlation(*sizes)(one, two), flownets(one, two, *sizes, corner=True)
    )
    # Along rows only: as in a frame that is as high as displacements are, without these.
    framed = [F.pad(x, (0, 0, *[sizes[2] - sizes[0]] * 2)) for x in (one, two)]
    count = 2 * (sizes[2] // sizes[4]) + 1
    wanted = flownets(*framed, *sizes, corner=True).unflatten(1, (count, count))[:, count // 2]
    torch.testing.assert_close(Correlation1d(*sizes)(one, two), wanted)
    with pytest.raises(NotImplementedError, match="kernel_size 2"):
        Correlation(2, 2, 2, 1, 1)(one, two)


@pytest.mark.parametrize("bilinear", [True, False])
def test_flownets_warp(bilinear: bool) -> None:
    image, flow = drawn(2, 3, 4, 5), 3 * drawn(2, 2, 4, 5, seed=1)
    flow[0, 0, 0, 0], flow[0, 1, 3, 0] = 1e30, -1e30
    expected = torch.empty_like(image)
    for b, y, x in np.ndindex(2, 4, 5):
        v, u = y + float(flow[b, 1, y, x]), x + float(flow[b, 0, y, x])
        expected[b, :, y, x] = 0
        if not bilinear:
            row, column = min(max(floor(v + 0.5), 0), 3), min(max(floor(u + 0.5), 0), 4)
            expected[b, :, y, x] = image[b, :, row, column]
            continue
        for i, j in itertools.product((0, 1), (0, 1)):
            row, column = floor(v) + i, floor(u) + j
            weight = abs(1 - i - (v - floor(v))) * abs(1 - j - (u - floor(u)))
            row, column = min(max(row, 0), 3), min(max(column, 0), 4)
            expected[b, :, y, x] += weight * image[b, :, row, column]

    def forward(a: Tensor, b: Tensor) -> Tensor:
        output = a.new_zeros(len(b), a.shape[1], *b.shape[2:])
        resample2d_cuda.forward(a, b, output, 1, bilinear)
        return output

    torch.testing.assert_close(forward(image, flow), expected)
    flow = flow.clamp(-9, 9)

    def backward(cotangent: Tensor) -> list[Tensor]:
        found = [image.new_empty(0), flow.new_empty(0)]
        resample2d_cuda.backward(image, flow, cotangent, *found, 1, bilinear)
        return found if bilinear else found[:1]

    if bilinear:
        differentiates(forward, backward, image, flow)
    else:
        differentiates(lambda a: forward(a, flow), backward, image)
    with pytest.raises(NotImplementedError, match="kernel_size 3"):
        resample2d_cuda.forward(image, flow, image.clone(), 3, bilinear)
    with pytest.raises(ValueError, match="a flow of"):
        resample2d_cuda.forward(image, flow[..., 1:], image.clone(), 1, bilinear)


def test_flownets_norm_over_channels() -> None:
    x = drawn(2, 3, 4, 5)

    def forward(a: Tensor) -> Tensor:
        output = a.new_zeros(2, 1, 4, 5)
        channelnorm_cuda.forward(a, output, 2)
        return output

    torch.testing.assert_close(forward(x), (x * x).sum(1, keepdim=True).sqrt())

    def backward(cotangent: Tensor) -> list[Tensor]:
        found = torch.empty_like(x)
        channelnorm_cuda.backward(x, forward(x), cotangent, found, 2)
        return [found]

    differentiates(forward, backward, x)
    x[0, :, 1, 1] = 0
    assert (backward(torch.ones(2, 1, 4, 5))[0][0, :, 1, 1] == 0).all()


def test_rafts_lookup_of_correlations() -> None:
    one, two, radius = drawn(2, 3, 4, 6), drawn(2, 4, 5, 6, seed=1), 2
    coords = 4 * drawn(2, 2, 3, 4, 2, seed=2) + 2
    coords[0, 0, 0, 0, 0], coords[0, 1, 0, 0] = 1e30, torch.tensor([3.0, 1.0])
    side = 2 * radius + 1
    expected = np.zeros((2, 2, side * side, 3, 4))
    for b, n, y, x in np.ndindex(2, 2, 3, 4):
        u, v = coords[b, n, y, x].tolist()
        for i, j, p, q in itertools.product(range(side), range(side), (0, 1), (0, 1)):
            weight = abs(1 - p - (v - floor(v))) * abs(1 - q - (u - floor(u)))
            place = (floor(v) - radius + j + p, floor(u) - radius + i + q)
            found = at(two[b].permute(2, 0, 1).numpy(), *place) @ one[b, y, x].numpy()
            expected[b, n, i * side + j, y, x] += weight * found
    (found,) = alt_cuda_corr.forward(one, two, coords, radius)
    torch.testing.assert_close(found, torch.from_numpy(expected))
    differentiates(
        lambda a, b: alt_cuda_corr.forward(a, b, coords, radius)[0],
        lambda g: alt_cuda_corr.backward(one, two, coords, g, radius)[:2],
        one,
        two,
    )
    assert (alt_cuda_corr.backward(one, two, coords, found, radius)[2] == 0).all()


def test_raft_stereos_lookup_in_a_volume() -> None:
    volume, radius = drawn(2, 3, 4, 7), 2
    coords = 4 * drawn(2, 1, 3, 4, seed=2) + 3
    coords[0, 0, 0, 0], coords[1, 0, 0, 0] = -1e30, 5.0
    expected = torch.zeros(2, 2 * radius + 1, 3, 4, dtype=torch.float64)
    for b, y, x in np.ndindex(2, 3, 4):
        u = float(coords[b, 0, y, x])
        for i, q in itertools.product(range(2 * radius + 1), (0, 1)):
            if 0 <= (column := floor(u) - radius + i + q) < 7:
                weight = abs(1 - q - (u - floor(u)))
                expected[b, i, y, x] += weight * volume[b, y, x, column]
    (found,) = corr_sampler.forward(volume, coords, radius)
    torch.testing.assert_close(found, expected)
    differentiates(
        lambda a: corr_sampler.forward(a, coords, radius)[0],
        lambda g: corr_sampler.backward(volume, coords, g, radius),
        volume,
    )
