"""The stand-in for MinkowskiEngine: tensors, fields of points, and what makes them."""

import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseport.exporter import shims
from fuseport.tests.test_shims_minkowski import ME, cells, dense, layer, rows, sparse
from fuseport.tests.test_shims_spconv import same
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    from MinkowskiEngine import MinkowskiFunctional
    from MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck


def test_modules_and_functions_of_features() -> None:
    x = sparse()
    assert isinstance(ME.MinkowskiReLU(inplace=True).module, nn.ReLU)
    close(ME.MinkowskiLeakyReLU(0.3)(x).F, F.leaky_relu(x.F, 0.3))
    close(MinkowskiFunctional.softmax(x, dim=1).F, x.F.softmax(1))
    close(MinkowskiFunctional.normalize(x).F, F.normalize(x.F))
    target = torch.zeros(40, dtype=torch.long)
    close(MinkowskiFunctional.cross_entropy(x, target), F.cross_entropy(x.F, target))
    linear = ME.MinkowskiLinear(3, 2).double()
    assert list(linear.state_dict()) == ["linear.weight", "linear.bias"]
    close(linear(x).F, linear.linear(x.F))
    sine = ME.MinkowskiSinusoidal(3, 2).double()
    close(sine(x).F, torch.sin(x.F @ sine.kernel + sine.bias) * sine.coef)


def test_sums_at_the_same_voxels() -> None:
    x = sparse()
    y = x.with_features(rand(40, 3))
    close((x + y).F, x.F + y.F)
    close((x - y.F).F, x.F - y.F)
    close(ME.cat(x, y).F, torch.cat([x.F, y.F], 1))
    close(ME.cat([x, y]).F, torch.cat([x.F, y.F], 1))
    close(ME.sum(x, y, y).F, x.F + 2 * y.F)
    close(ME.mean(x, y).F, (x.F + y.F) / 2)
    close(ME.var(x, y).F, ((x.F - y.F) / 2) ** 2)
    twice = ME.MinkowskiStackCat(nn.Identity(), nn.Identity())
    close(twice(x).F, torch.cat([x.F, x.F], 1))
    z = y.with_features(y.F.clone())
    z += y
    close(z.F, 2 * y.F)
    with pytest.raises(AssertionError, match="same coordinate manager"):
        x + sparse()
    with pytest.raises(AssertionError, match="same coordinate_map_key"):
        ME.cat(x, ME.SparseTensor(y.F, x.C, coordinate_manager=x.coordinate_manager))


def test_sums_of_tensors_with_voxels_of_their_own() -> None:
    x = sparse()
    moved = torch.cat([x.C[:5], x.C[5:9] + torch.tensor([0, 20, 0, 0]).int()])
    features = rand(9, 3).requires_grad_()
    y = ME.SparseTensor(features, moved, coordinate_manager=x.coordinate_manager)
    assert y.coordinate_map_key != x.coordinate_map_key
    both = ME.MinkowskiUnion()(x, y)
    assert rows(both.C) == [*rows(x.C), *rows(moved[5:])]
    expected = torch.cat([x.F[:5] + features[:5], x.F[5:], features[5:]])
    same(both.F, expected, [x.F, features])
    same((x + y).F, expected, [x.F, features])
    # What the other has no voxel for is left as it is, of products, too.
    product = torch.cat([x.F[:5] * features[:5], x.F[5:], 0 * features[5:]])
    same((x * y).F, product, [x.F, features])
    pruned = ME.MinkowskiPruning()(x, x.F[:, 0] > 0)
    assert rows(pruned.C) == rows(x.C[x.F[:, 0] > 0])
    same(pruned.F, x.F[x.F[:, 0] > 0], [x.F])


def test_voxels_that_are_alike_become_one() -> None:
    x = sparse()
    twice = torch.cat([x.C, x.C[3:7]])
    features = torch.cat([x.F, rand(4, 3)]).detach().requires_grad_()
    modes = ME.SparseTensorQuantizationMode
    first = ME.SparseTensor(features, twice)
    assert rows(first.C) == rows(x.C)
    same(first.F, features[:40], [features])
    assert first.unique_index.tolist() == list(range(40))
    assert first.inverse_mapping.tolist() == [*range(40), 3, 4, 5, 6]
    total = ME.SparseTensor(features, twice, quantization_mode=modes.UNWEIGHTED_SUM)
    added = torch.cat([features[:3], features[3:7] + features[40:], features[7:40]])
    same(total.F, added, [features])
    mean = ME.SparseTensor(features, twice, quantization_mode=modes.UNWEIGHTED_AVERAGE)
    halves = torch.cat([features[:3], (features[3:7] + features[40:]) / 2, features[7:40]])
    same(mean.F, halves, [features])
    close(mean.slice(mean).F, halves[first.inverse_mapping])
    plain = ME.SparseTensor(x.F, x.C, quantization_mode=modes.NO_QUANTIZATION)
    assert plain.F is x.F
    floats = ME.SparseTensor(x.F, x.C.float() + 0.5)
    assert rows(floats.C) == rows(x.C)


def test_fields_of_points() -> None:
    x = sparse()
    cell = torch.cat([x.C, x.C[:6]]).float()
    points = cell + torch.rand(cell.shape, generator=torch.Generator().manual_seed(0)) * 0.9
    points[:, 0] = cell[:, 0]
    features = rand(46, 3).requires_grad_()
    field = ME.TensorField(features, points)
    y = field.sparse()
    assert rows(y.C) == rows(x.C)
    same(y.F, torch.cat([(features[:6] + features[40:]) / 2, features[6:40]]), [features])
    voxel = torch.tensor([*range(40), *range(6)])
    close(y.slice(field).F, y.F[voxel])
    close(y.cat_slice(field).F, torch.cat([y.F[voxel], features], 1))
    coarse = layer("Convolution", 3, 4, 3, 2)(y)
    wide = cells(x.C, [2] * 3)
    known = [wide.index(cells(row[None].floor().int(), [2] * 3)[0]) for row in points]
    close(coarse.slice(field).F, coarse.F[known])
    most = field.sparse(quantization_mode=ME.SparseTensorQuantizationMode.MAX_POOL)
    same(
        most.F,
        torch.cat([torch.maximum(features[:6], features[40:]), features[6:40]]),
        [features],
    )
    assert rows(field.sparse(2).C) == wide
    close(ME.MinkowskiReLU()(field).F, features.relu())
    whole = ME.MinkowskiGlobalMaxPooling()(field)
    close(whole.F[1], features[points[:, 0] == 1].amax(0))


def test_between_voxels() -> None:
    x = sparse(step=2)
    points = torch.rand(30, 4, generator=torch.Generator().manual_seed(1)).double() * 8 - 4
    points[:, 0] = torch.arange(30) % 2
    found = ME.MinkowskiInterpolation()(x, points)
    known = {row: i for i, row in enumerate(rows(x.C))}
    expected = []
    for point in points.tolist():
        start = [int(np.floor(value / 2)) * 2 for value in point[1:]]
        total = torch.zeros(3).double()
        for corner in itertools.product(*((value, value + 2) for value in start)):
            if (row := (int(point[0]), *corner)) in known:
                near = np.prod([1 - abs(a - b) / 2 for a, b in zip(point[1:], corner, strict=True)])
                total = total + near * x.F[known[row]]
        expected.append(total)
    same(found, torch.stack(expected), [x.F])
    close(x.features_at_coordinates(points), found)


def test_dense_tensors() -> None:
    volume = rand(2, 3, 4, 5, 6)
    volume = (volume * (rand(2, 1, 4, 5, 6) > 0)).requires_grad_()
    some = ME.to_sparse(volume)
    assert len(some) == (volume[:, 0] != 0).sum()
    close(some.dense(volume.shape)[0], volume)
    every = ME.MinkowskiToSparseTensor()(volume)
    assert every.F.shape == (240, 3)
    same(ME.MinkowskiToDenseTensor(volume.shape)(every), volume, [volume])
    close(every.dense()[0], volume)
    assert every.dense()[1].tolist() == [[0, 0, 0]]
    x = sparse(step=2)
    found, start, stride = x.dense(min_coordinate=torch.tensor([-4, -4, -4]).int())
    assert stride.tolist() == [2, 2, 2]
    assert start.tolist() == [-4, -4, -4]
    close(found, dense(x)[:, :, 4:13:2, 4:13:2, 4:13:2])


def test_each_batch() -> None:
    x = sparse()
    own = [x.C[:, 0] == batch for batch in range(2)]
    assert [len(each) for each in x.decomposed_features] == [int(mask.sum()) for mask in own]
    close(x.features_at(1), x.F[own[1]])
    close(x.decomposed_coordinates[0], x.C[own[0], 1:])
    coordinates, features = x.decomposed_coordinates_and_features
    close(features[1], x.features_at(1))
    close(coordinates[1], x.coordinates_at(1))


def test_no_voxels() -> None:
    none = ME.MinkowskiPruning()(sparse(), torch.zeros(40, dtype=torch.bool))
    down = layer("Convolution", 3, 4, 3, 2)(none)
    assert down.F.shape == (0, 4)
    assert layer("ConvolutionTranspose", 4, 5, 2, 2, expand_coordinates=True)(down).F.shape == (
        0,
        5,
    )
    assert ME.MinkowskiMaxPooling(2, 2, dimension=3)(none).F.shape == (0, 3)


def test_inputs_are_made_as_there() -> None:
    clouds = [np.array([[0.5, -0.5], [2.0, 3.9]]), torch.tensor([[1.0, -2.5]])]
    batched = ME.utils.batched_coordinates(clouds)
    assert batched.tolist() == [[0, 0, -1], [0, 2, 3], [1, 1, -3]]
    assert batched.dtype == torch.int32
    features = [rand(2, 3), rand(1, 3)]
    coordinates, joined, labels = ME.utils.sparse_collate(clouds, features, [[1], [2]])
    assert torch.equal(coordinates, batched)
    close(joined, torch.cat(features))
    assert labels == [[1], [2]]
    kept = ME.utils.SparseCollation(limit_numpoints=2)
    with pytest.warns(UserWarning, match="over the limit"):
        few = kept(list(zip(clouds, features, [torch.ones(2), torch.ones(1)], strict=True)))
    assert few[0].tolist() == batched[:2].tolist()
    points = torch.tensor([[0.1, 0.1], [0.3, 0.1], [0.15, 0.12]])
    voxels, index, inverse = ME.utils.sparse_quantize(
        points, return_index=True, return_inverse=True, quantization_size=0.2
    )
    assert voxels.tolist() == [[0, 0], [1, 0]]
    assert index.tolist() == [0, 1]
    assert inverse.tolist() == [0, 1, 0]
    with pytest.raises(NotImplementedError, match="labels"):
        ME.utils.sparse_quantize(points, labels=torch.zeros(3))
    weight = ME.utils.kaiming_normal_(torch.empty(27, 64, 64), mode="fan_out", nonlinearity="relu")
    assert abs(weight.std().item() - (2 / (27 * 64)) ** 0.5) < 1e-3


def test_blocks_are_of_the_names_of_checkpoints() -> None:
    names = set(BasicBlock(3, 3, dimension=3).state_dict())
    assert {"conv1.kernel", "norm1.bn.weight", "conv2.kernel", "norm2.bn.running_var"} <= names
    x = sparse()
    wide = nn.Sequential(ME.MinkowskiConvolution(3, 8, 1, 2, dimension=3))
    block = Bottleneck(3, 2, stride=2, downsample=wide, dimension=3).double().eval()
    y = block(x)
    assert y.tensor_stride == [2] * 3
    inner = block.relu(block.norm1(block.conv1(x)))
    inner = block.norm3(block.conv3(block.relu(block.norm2(block.conv2(inner)))))
    close(y.F, (inner.F + wide(x).F).relu())


def test_maps_of_a_manager() -> None:
    x = sparse()
    conv = layer("Convolution", 3, 4, 3, 2)
    y = conv(x)
    manager, total = x.coordinate_manager, torch.zeros_like(y.F)
    found = manager.kernel_map(1, y.coordinate_map_key, stride=2, kernel_size=3)
    assert list(found) == list(range(27))
    for place, (into, out) in found.items():
        total = total.index_add(0, out.long(), x.F[into.long()] @ conv.kernel[place])
    close(total, y.F)
    cells = manager.kernel_map(1, 2, stride=2, kernel_size=2, is_pool=True)[0]
    assert cells.tolist() == [each.tolist() for each in manager.stride_map(*keys(x, y))]
    assert [rows(y.C)[cell] for cell in cells[1].tolist()] == [
        (row[0], *(n // 2 * 2 for n in row[1:])) for row in rows(x.C)
    ]
    back = manager.kernel_map(*keys(y, x), stride=2, kernel_size=2, is_transpose=True, is_pool=True)
    assert torch.equal(back[0], cells.flip(0))
    key = ME.CoordinateMapKey(4)
    for each, (own, union) in zip((x, y), manager.union_map(keys(x, y), key), strict=True):
        assert torch.equal(each.C[own], manager.get_coordinates(key)[union])


def keys(*tensors: Any) -> list[Any]:
    return [each.coordinate_map_key for each in tensors]


def test_a_manager_that_is_shared() -> None:
    modes = ME.SparseTensorOperationMode
    ME.set_sparse_tensor_operation_mode(modes.SHARE_COORDINATE_MANAGER)
    try:
        x, y = sparse(), sparse()
        assert x.coordinate_manager is y.coordinate_manager
        assert x.coordinate_map_key != y.coordinate_map_key
    finally:
        ME.set_sparse_tensor_operation_mode(modes.SEPARATE_COORDINATE_MANAGER)
        ME.clear_global_coordinate_manager()
    assert sparse().coordinate_manager is not x.coordinate_manager


def test_what_has_no_form_says_so() -> None:
    x = sparse()
    for call, message in (
        (lambda: ME.KernelGenerator(3, region_type=ME.RegionType.CUSTOM, dimension=3), "CUSTOM"),
        (lambda: ME.MinkowskiStableInstanceNorm(3), "MinkowskiStableInstanceNorm"),
        (lambda: x.sparse(), "torch's"),
        (lambda: x.coordinate_manager.origin_map(1), "origin_map"),
        (lambda: ME.TensorField(x.F, x.C.float()).splat(), "splat"),
        (lambda: ME.MinkowskiInterpolation(return_weights=True), "in no order"),
        (lambda: importlib.import_module("MinkowskiEngine.diagnostics"), "no such part"),
    ):
        with (
            shims.installed("MinkowskiEngine"),
            pytest.raises((NotImplementedError, ModuleNotFoundError), match=message),
        ):
            call()
    far = torch.tensor([[0, 0, 0, 0], [0, *[2**31 - 1] * 3]]).int()
    with pytest.raises(ValueError, match=r"more than the 2\^62"):
        ME.SparseTensor(rand(2, 3), far)


def test_classes_keep_their_names_when_parts_are_imported_again() -> None:
    with shims.installed("MinkowskiEngine"):
        for part in ("modules.senet_block", "MinkowskiPooling", "utils"):
            importlib.import_module(f"MinkowskiEngine.{part}")
        again = importlib.import_module("MinkowskiEngine")
        assert again is ME
        named = [getattr(again, name) for name in again.__all__ if name.startswith("Minkowski")]
    kept = {"MinkowskiFunctional", "MinkowskiOps"}
    assert {
        each.__name__.rpartition(".")[2] for each in named if not isinstance(each, type)
    } == kept
