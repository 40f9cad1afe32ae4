"""The stand-in for MinkowskiEngine against dense convolutions, and sums written out."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.test_shims_spconv import CONV, TRANSPOSED, same
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import MinkowskiEngine as ME  # noqa: N817  # as everywhere
    from MinkowskiEngine.MinkowskiKernelGenerator import offsets
    from MinkowskiEngine.modules.senet_block import SELayer

LOW, SIZE = -8, 24  # of the dense volumes, in each dimension
WINDOWS: list[tuple[Any, Any, Any]] = [(3, 2, 1), (2, 2, 1), (3, 1, 2), (5, 1, 1), (4, 2, 1)]
MIXED = ((3, 2, 1), (2, 1, 3), (1, 2, 1))


def sparse(d: int = 3, channels: int = 3, step: int = 1, count: int = 40) -> Any:
    """Voxels on both sides of 0, in no order, that differ, with features that have gradients."""
    generator = torch.Generator().manual_seed(d)
    places = list(itertools.product(range(2), *([range(-4, 5, step)] * d)))
    order = torch.randperm(len(places), generator=generator)[:count]
    features = rand(min(count, len(places)), channels).requires_grad_()
    return ME.SparseTensor(features, torch.tensor(places)[order].int(), tensor_stride=step)


def dense(x: Any) -> Tensor:
    """(b, c, …): features at places from LOW on, whatever the tensor stride."""
    volume = x.F.new_zeros(2, *[SIZE] * x.D, x.F.shape[1])
    places = [x.C[:, 0].long(), *(column.long() - LOW for column in x.C[:, 1:].unbind(1))]
    return volume.index_put(places, x.F).movedim(-1, 1)


def at(volume: Tensor, coordinates: Tensor) -> Tensor:
    places = [coordinates[:, 0].long(), *(x.long() - LOW for x in coordinates[:, 1:].unbind(1))]
    return volume.movedim(1, -1)[tuple(places)]


def kernel(layer: Any) -> Tensor:
    """(out, in, …), of (places, in, out), whose places change along the first axis first."""
    d, size = layer.dimension, layer.kernel_generator.kernel_size
    weight = layer.kernel.unflatten(0, size[::-1])
    return weight.permute(d + 1, d, *range(d)[::-1])


def convolved(layer: Any, x: Any, weight: Tensor | None = None) -> Tensor:
    """At all places: windows of odd sizes centred, those of even sizes from there on."""
    window, d = layer.kernel_generator, x.D
    spread = [a * b for a, b in zip(window.kernel_dilation, x.tensor_stride, strict=True)]
    pads = []
    for size, step in zip(window.kernel_size[::-1], spread[::-1], strict=True):
        pads += [size // 2 * step] * 2 if size % 2 else [0, (size - 1) * step]
    volume = F.pad(dense(x), pads)
    return CONV[d](volume, kernel(layer) if weight is None else weight, dilation=spread)


def spread(layer: Any, x: Any) -> Tensor:
    """The transposed convolution, at all places."""
    window, d = layer.kernel_generator, x.D
    fine = [a // b for a, b in zip(x.tensor_stride, window.kernel_stride, strict=True)]
    dilation = [a * b for a, b in zip(window.kernel_dilation, fine, strict=True)]
    padding = [
        size // 2 * step if size % 2 else 0
        for size, step in zip(window.kernel_size, dilation, strict=True)
    ]
    weight = kernel(layer).transpose(0, 1)
    whole = TRANSPOSED[d](dense(x), weight, padding=padding, dilation=dilation)
    return whole[(..., *[slice(SIZE)] * d)]


def rows(coordinates: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in coordinates.tolist()]


def cells(coordinates: Tensor, stride: Iterable[int]) -> list[tuple[int, ...]]:
    """Each once, in the order in which they come."""
    found = [
        (row[0], *(x // step * step for x, step in zip(row[1:], stride, strict=True)))
        for row in rows(coordinates)
    ]
    return list(dict.fromkeys(found))


def windows(d: int) -> list[tuple[Any, Any, Any]]:
    return [*WINDOWS, MIXED] if d == 3 else WINDOWS


def layer(name: str, *arguments: Any, d: int = 3, **named: Any) -> Any:
    torch.manual_seed(0)
    return getattr(ME, f"Minkowski{name}")(*arguments, dimension=d, **named).double()


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2])
def test_a_convolution_is_the_dense_one_at_the_cells_of_voxels(d: int, step: int) -> None:
    x = sparse(d, step=step)
    for size, stride, dilation in windows(d):
        conv = layer("Convolution", 3, 4, size, stride, dilation, bias=True, d=d)
        y = conv(x)
        strides = conv.kernel_generator.kernel_stride
        assert y.tensor_stride == [step * by for by in strides]
        assert rows(y.C) == cells(x.C, y.tensor_stride)
        assert y.C.dtype == torch.int32
        assert y.coordinate_manager is x.coordinate_manager
        expected = at(convolved(conv, x), y.C) + conv.bias
        same(y.F, expected, [x.F, conv.kernel, conv.bias])
    assert dict(conv.named_parameters())["bias"].shape == (1, 4)


def test_a_kernel_s_places_are_in_the_order_of_the_package() -> None:
    """As `coordinate_at` in src/kernel_region.hpp says, for a few numbers done by hand."""
    cube = ME.KernelGenerator(kernel_size=[3, 2, 1], dilation=[2, 1, 1], dimension=3)
    assert offsets(cube, [1, 4, 1]) == [
        [-2, 0, 0],
        [0, 0, 0],
        [2, 0, 0],
        [-2, 4, 0],
        [0, 4, 0],
        [2, 4, 0],
    ]
    cross = ME.KernelGenerator(
        kernel_size=[5, 3], region_type=ME.RegionType.HYPER_CROSS, dimension=2
    )
    along = [[0, 0], [1, 0], [2, 0], [-2, 0], [-1, 0], [0, 1], [0, -1]]
    assert offsets(cross, [1, 1]) == along
    assert cross.kernel_volume == len(along)


def test_a_cross_sees_its_axes_alone() -> None:
    x = sparse()
    window = ME.KernelGenerator(3, region_type=ME.RegionType.HYPER_CROSS, dimension=3)
    conv = layer("Convolution", 3, 4, kernel_generator=window)
    places = [(1, 1, 1), (2, 1, 1), (0, 1, 1), (1, 2, 1), (1, 0, 1), (1, 1, 2), (1, 1, 0)]
    weight = conv.kernel.new_zeros(3, 3, 3, 4, 3)
    weight = weight.index_put(list(torch.tensor(places).T), conv.kernel.mT).movedim(
        (-2, -1), (0, 1)
    )
    same(conv(x).F, at(convolved(conv, x, weight), x.C), [x.F, conv.kernel])


def test_a_convolution_of_one_place_is_a_product() -> None:
    x = sparse()
    conv = layer("Convolution", 3, 4, 1, bias=True)
    assert conv.kernel.shape == (3, 4)
    y = conv(x)
    assert y.coordinate_map_key == x.coordinate_map_key
    same(y.F, x.F @ conv.kernel + conv.bias, [x.F, conv.kernel, conv.bias])
    strided = layer("Convolution", 3, 4, 1, 2)
    assert strided.kernel.shape == (1, 3, 4)
    z = strided(x)
    assert rows(z.C) == cells(x.C, [2] * 3)
    close(z.F, at(convolved(strided, x), z.C))
    # In one dimension it is one with a stride, too: as there.
    assert layer("Convolution", 3, 4, 1, 2, d=1).kernel.shape == (3, 4)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_transposed_convolution_goes_back_to_the_voxels_that_there_are(d: int) -> None:
    x = sparse(d)
    for size, stride, dilation in [(2, 2, 1), (3, 2, 1), (3, 2, 2), (4, 2, 1)]:
        y = layer("Convolution", 3, 4, 2, stride, d=d)(x)
        up = layer("ConvolutionTranspose", 4, 5, size, stride, dilation, bias=True, d=d)
        z = up(y)
        assert z.coordinate_map_key == x.coordinate_map_key
        assert z.tensor_stride == [1] * d
        same(z.F, at(spread(up, y), x.C) + up.bias, [y.F, up.kernel, up.bias])
    with pytest.raises(AssertionError, match="Invalid up stride"):
        layer("ConvolutionTranspose", 3, 4, 3, 2, d=d)(x)


@pytest.mark.parametrize("size", [2, 3])
def test_a_generative_convolution_makes_all_voxels_that_it_reaches(size: int) -> None:
    x = sparse(step=4, count=12)
    up = layer("GenerativeConvolutionTranspose", 3, 4, size, 2)
    y = up(x)
    assert y.tensor_stride == [2] * 3
    ones = x.with_features(torch.ones_like(x.F[:, :1]))
    all_one = layer("GenerativeConvolutionTranspose", 1, 1, size, 2)
    nn.init.ones_(all_one.kernel)
    reached = (spread(all_one, ones)[:, 0] > 0).nonzero()
    reached[:, 1:] += LOW
    assert set(rows(y.C)) == set(rows(reached))
    same(y.F, at(spread(up, x), y.C), [x.F, up.kernel])
    # Another makes voxels of its own, of another key, though there are some of the stride.
    assert up(x).coordinate_map_key != y.coordinate_map_key
    # One that does not expand takes what is there; without, it makes the same.
    close(layer("ConvolutionTranspose", 3, 4, size, 2)(sparse(step=4, count=12)).F.shape, y.F.shape)


def test_a_convolution_may_expand() -> None:
    x = sparse(count=6)
    conv = layer("Convolution", 3, 4, 3, expand_coordinates=True)
    y = conv(x)
    ones = F.conv3d(dense(x.with_features(torch.ones_like(x.F[:, :1]))), rand(1, 1, 3, 3, 3).abs())
    reached = (F.pad(ones, [1] * 6)[:, 0] > 0).nonzero()
    reached[:, 1:] += LOW
    assert set(rows(y.C)) == set(rows(reached))
    same(y.F, at(convolved(conv, x), y.C), [x.F, conv.kernel])
    strided = layer("Convolution", 3, 4, 3, 2, expand_coordinates=True)(x)
    assert set(rows(strided.C)) == {row for row in rows(y.C) if not any(n % 2 for n in row[1:])}


def test_at_the_voxels_of_another_tensor() -> None:
    x, step = sparse(), torch.tensor([0, 1, 1, 1]).int()
    other = ME.SparseTensor(rand(5, 1), x.C[:5] + step, coordinate_manager=x.coordinate_manager)
    conv = layer("Convolution", 3, 4, 3)
    for target in (other, other.coordinate_map_key):
        y = conv(x, coordinates=target)
        assert y.coordinate_map_key == other.coordinate_map_key
        close(y.F, at(convolved(conv, x), other.C))
    pool = ME.MinkowskiSumPooling(3, dimension=3)
    assert pool(x, other.C).F.shape == (5, 3)
    far = ME.SparseTensor(
        rand(1, 1), x.C[:1] + 50, tensor_stride=2, coordinate_manager=x.coordinate_manager
    )
    assert not ME.MinkowskiAvgPooling(2, 2, dimension=3)(x, far).F.any()
    with pytest.raises(NotImplementedError, match="tensor stride of 0"):
        conv(x, coordinates=other.C)


def test_channels_by_themselves() -> None:
    x = sparse()
    conv = layer("ChannelwiseConvolution", 3, 3, 2, bias=True)
    y = conv(x)
    full = layer("Convolution", 3, 3, 3, 2)
    full.kernel.data = torch.diag_embed(conv.kernel.detach())
    close(y.F, full(x).F + conv.bias)
    assert conv.kernel.shape == (27, 3)
    window = ME.KernelGenerator(3, region_type=ME.RegionType.HYPER_CROSS, dimension=3)
    with pytest.raises(NotImplementedError, match="HYPER_CUBE"):
        ME.MinkowskiChannelwiseConvolution(3, kernel_generator=window, dimension=3)


def seen(x: Any, place: tuple[int, ...], window: Iterable[Iterable[int]]) -> list[int]:
    """Rows of the voxels in a window around a place."""
    known = {row: i for i, row in enumerate(rows(x.C))}
    around = ((place[0], *map(sum, zip(place[1:], step, strict=True))) for step in window)
    return [known[row] for row in around if row in known]


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 3), (3, 1)])
def test_pooling(size: int, stride: int) -> None:
    x = sparse(count=200)
    # What a window of the size of its stride has is a cell, also where it is odd.
    start = 0 if size == stride else -(size // 2)
    window = list(itertools.product(range(start, start + size), repeat=3))
    for name, of in (
        ("Sum", lambda values: values.sum(0)),
        ("Avg", lambda values: values.mean(0)),
        ("Max", lambda values: values.amax(0)),
    ):
        y = getattr(ME, f"Minkowski{name}Pooling")(size, stride, dimension=3)(x)
        assert rows(y.C) == cells(x.C, [stride] * 3)
        expected = torch.stack([of(x.F[seen(x, row, window)]) for row in rows(y.C)])
        same(y.F, expected, [x.F])


def test_of_values_that_are_as_large_the_first_has_the_gradient() -> None:
    values = torch.tensor([[2.0, -1.0], [2.0, -1.0], [1.0, -1.0]]).double().requires_grad_()
    places = torch.tensor([[0, 1], [0, 0], [0, -1]]).int()
    x = ME.SparseTensor(values, places)
    for pool, expected in (
        (ME.MinkowskiMaxPooling(2, 2, dimension=1), [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]),
        (ME.MinkowskiGlobalMaxPooling(), [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
    ):
        (gradient,) = torch.autograd.grad(pool(x).F.sum(), values, retain_graph=True)
        assert gradient.tolist() == expected
    # A window goes along its axis, where a cell has its voxels in their order.
    wide = ME.MinkowskiMaxPooling(3, 2, dimension=1)
    y = wide(x)
    assert rows(y.C) == [(0, 0), (0, -2)]
    (gradient,) = torch.autograd.grad(y.F[0].sum(), values)
    assert gradient.tolist() == [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]


def test_a_largest_value_of_nothing_is_refused() -> None:
    for size, stride, dilation in ((1, 2, 1), (2, 3, 1), (3, 2, 2)):
        with pytest.raises(NotImplementedError, match="does not have all of a cell"):
            ME.MinkowskiMaxPooling(size, stride, dilation, dimension=3)


@pytest.mark.parametrize("size", [2, 3])
def test_a_transposed_pooling_adds_up(size: int) -> None:
    x = sparse()
    y = ME.MinkowskiAvgPooling(2, 2, dimension=3)(x)
    z = ME.MinkowskiPoolingTranspose(size, 2, dimension=3)(y)
    assert z.coordinate_map_key == x.coordinate_map_key
    copies = layer("ConvolutionTranspose", 3, 3, size, 2)
    copies.kernel.data = torch.eye(3).double().expand(size**3, 3, 3).clone()
    same(z.F, at(spread(copies, y), x.C), [x.F])


def test_over_batches_and_back() -> None:
    x = sparse()
    each = [x.F[x.C[:, 0] == batch] for batch in range(2)]
    mean = ME.MinkowskiGlobalAvgPooling()(x)
    same(mean.F, torch.stack([values.mean(0) for values in each]), [x.F])
    assert mean.C.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert mean.tensor_stride == [0, 0, 0]
    total, most = ME.MinkowskiGlobalSumPooling()(x), ME.MinkowskiGlobalMaxPooling()(x)
    same(total.F, torch.stack([values.sum(0) for values in each]), [x.F])
    same(most.F, torch.stack([values.amax(0) for values in each]), [x.F])
    theirs = mean.F[x.C[:, 0].long()]
    close(ME.MinkowskiBroadcast()(x, mean).F, theirs)
    close(ME.MinkowskiBroadcastAddition()(x, mean).F, x.F + theirs)
    close(ME.MinkowskiBroadcastMultiplication()(x, mean).F, x.F * theirs)
    close(ME.MinkowskiBroadcastConcatenation()(x, mean).F, torch.cat([x.F, theirs], 1))
    excited = SELayer(3, 1).double()
    scale = torch.sigmoid(excited.fc[2].linear(excited.fc[0].linear(mean.F).relu()))
    close(excited(x).F, x.F * scale[x.C[:, 0].long()])
    with pytest.raises(NotImplementedError, match="leave them out"):
        ME.MinkowskiGlobalAvgPooling()(x, x)
    # A batch that has no voxel any more is still one.
    some = ME.MinkowskiPruning()(x, x.C[:, 0] == 1)
    assert ME.MinkowskiGlobalSumPooling()(some).F[0].tolist() == [0.0, 0.0, 0.0]


def test_norms() -> None:
    x = sparse()
    norm = ME.MinkowskiInstanceNorm(3).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    expected = torch.empty_like(x.F)
    for batch in range(2):
        own = x.C[:, 0] == batch
        values = x.F[own]
        variance = values.var(0, correction=0)
        expected = expected.index_put(
            [own.nonzero()[:, 0]],
            (values - values.mean(0)) / (variance + 1e-8).sqrt() * norm.weight + norm.bias,
        )
    same(norm(x).F, expected, [x.F, norm.weight, norm.bias])
    assert [tuple(p.shape) for p in norm.parameters()] == [(1, 3), (1, 3)]
    net = nn.Sequential(ME.MinkowskiBatchNorm(3), nn.Sequential(ME.MinkowskiBatchNorm(3))).eval()
    parallel = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(parallel[1][0].bn, nn.SyncBatchNorm)
    assert list(parallel.state_dict()) == list(net.state_dict())
    plain = ME.MinkowskiBatchNorm(3).double().eval()
    close(plain(x).F, F.batch_norm(x.F, *torch.tensor([[0.0] * 3, [1.0] * 3]).double()))
