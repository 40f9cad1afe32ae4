"""The stand-in for torchsparse against dense convolutions, and formulas written out."""

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.test_shims_spconv import same
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import torchsparse
    from torchsparse import SparseTensor, backend
    from torchsparse import nn as spnn
    from torchsparse.nn import functional as spf
    from torchsparse.nn.utils import fapply, get_kernel_offsets
    from torchsparse.tensor import set_allow_negative_coordinates
    from torchsparse.utils import tensor_cache
    from torchsparse.utils.collate import sparse_collate_fn
    from torchsparse.utils.quantize import sparse_quantize

SIZE = (6, 7, 8)


def sparse(channels: int = 3, spatial_range: Any = None) -> Any:
    """Voxels in no order, of which some are the last of their axes."""
    generator = torch.Generator().manual_seed(0)
    places = (torch.rand(2, *SIZE, generator=generator) < 0.15).nonzero()
    places = torch.cat([places, torch.tensor([[1, 5, 6, 7]])]).unique(dim=0)
    places = places[torch.randperm(len(places), generator=generator)]
    features = rand(len(places), channels).requires_grad_()
    return SparseTensor(features, places.int(), spatial_range=spatial_range)


def dense(x: Any, size: Any = SIZE) -> Tensor:
    """(b, c, …)."""
    volume = x.F.new_zeros(2, *size, x.F.shape[1])
    return volume.index_put([column.long() for column in x.C.unbind(1)], x.F).movedim(-1, 1)


def at(volume: Tensor, coords: Tensor) -> Tensor:
    return volume.movedim(1, -1)[tuple(coords.long().unbind(1))]


def kernel(layer: Any) -> Tensor:
    """(out, in, …): an odd number of places is along the first axis first, an even one the last."""
    a, b, c = layer.kernel_size
    if layer.kernel_volume % 2:
        return layer.kernel.unflatten(0, (c, b, a)).permute(4, 3, 2, 1, 0)
    return layer.kernel.unflatten(0, (a, b, c)).permute(4, 3, 0, 1, 2)


def conv(*arguments: Any, **named: Any) -> Any:
    torch.manual_seed(0)
    return spnn.Conv3d(*arguments, **named).double()


@pytest.mark.parametrize("size", [3, 5, (3, 1, 5)])
def test_a_convolution_without_a_stride_keeps_its_voxels(size: Any) -> None:
    x = sparse()
    layer = conv(3, 4, size, bias=True)
    y = layer(x)
    expected = F.conv3d(dense(x), kernel(layer), layer.bias, padding=layer.padding)
    assert y.C is x.C
    assert y.s == (1, 1, 1)
    same(y.F, at(expected, x.C), [x.F, layer.kernel, layer.bias])


@pytest.mark.parametrize("size", [2, (2, 3, 1)])
def test_an_even_window_without_a_stride_begins_at_its_voxel(size: Any) -> None:
    x = sparse()
    layer = conv(3, 4, size)
    room = [n for k in layer.kernel_size[::-1] for n in (0, k - 1)]
    expected = F.conv3d(F.pad(dense(x), room), kernel(layer))
    same(layer(x).F, at(expected, x.C), [x.F, layer.kernel])


@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [(2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 3, 1), (1, 2, 0), ((1, 3, 1), (1, 2, 1), 0), (4, 2, 1)],
)
def test_a_strided_convolution_is_the_dense_one_and_has_a_way_back(
    size: Any, stride: Any, padding: Any
) -> None:
    x = sparse()
    first = conv(3, 3, 3)(x)  # whose voxels it goes back to
    down = conv(3, 4, size, stride, padding, bias=True)
    y = down(first)
    where = {"stride": down.stride, "padding": down.padding}
    expected = F.conv3d(dense(first), kernel(down), down.bias, **where)
    ones = dense(first.with_features(torch.ones_like(first.F[:, :1])))
    seen = F.conv3d(ones, torch.ones(1, 1, *down.kernel_size).double(), **where)
    assert torch.equal(y.C.long(), (seen[:, 0] > 0).nonzero())  # in order
    assert y.s == down.stride
    same(y.F, at(expected, y.C), [x.F, down.kernel, down.bias])
    up = conv(4, 5, size, stride, padding, transposed=True, bias=True)
    z = up(y)
    assert z.C is x.C
    assert z.s == (1, 1, 1)
    spread = F.conv_transpose3d(
        dense(y, seen.shape[2:]), kernel(up).transpose(0, 1), stride=up.stride
    )
    widths = [
        n
        for extent, got, pad in zip(
            SIZE[::-1], spread.shape[:1:-1], down.padding[::-1], strict=True
        )
        for n in (-pad, extent + pad - got)
    ]
    expected = at(F.pad(spread, widths), x.C) + up.bias
    same(z.F, expected, [y.F, up.kernel, up.bias])


def test_a_transposed_convolution_wants_one_before_it() -> None:
    x = sparse()
    with pytest.raises(ValueError, match="has no layer of that window before it"):
        conv(3, 4, 2, 2, transposed=True)(SparseTensor(x.F, x.C, 2))


def test_a_volume_may_have_no_whole_window() -> None:
    x = SparseTensor(rand(1, 3), torch.tensor([[0, 4, 0, 4]]).int())
    fine = conv(3, 4, 3)(x)
    y = conv(4, 4, 3)(conv(4, 4, 2, 2)(fine))
    assert y.F.shape == (0, 4)
    z = conv(4, 5, 2, 2, transposed=True)(y)
    assert z.F.tolist() == [[0.0] * 5]
    assert spnn.GlobalMaxPool()(y).shape == spnn.GlobalAvgPool()(y).shape == (0, 4)
    assert spnn.GroupNorm(2, 4).double()(y).F.shape == (0, 4)


def test_a_transposed_convolution_of_one_without_a_stride() -> None:
    x = sparse()
    y = conv(3, 4, 3)(x)
    up = conv(4, 5, 3, transposed=True)
    expected = F.conv_transpose3d(dense(y), kernel(up).transpose(0, 1), padding=1)
    same(up(y).F, at(expected, x.C), [y.F, up.kernel])


def test_a_convolution_of_one_place_is_a_product() -> None:
    x = sparse()
    layer = conv(3, 4, 1, bias=True)
    assert layer.kernel.shape == (3, 4)
    same(layer(x).F, x.F @ layer.kernel + layer.bias, [x.F, layer.kernel, layer.bias])
    assert conv(3, 4, 1, 2).kernel.shape == (1, 3, 4)


def test_volumes_of_a_given_size() -> None:
    x = sparse(spatial_range=(2, 9, 9, 9))
    close(x.dense(), dense(x, (9, 9, 9)).movedim(1, -1))
    down = conv(3, 4, 3, 2, 1)
    y = down(conv(3, 3, 3)(x))
    assert y.spatial_range == (2, 5, 5, 5)
    whole = F.conv3d(dense(conv(3, 3, 3)(x), (9, 9, 9)), kernel(down), stride=2, padding=1)
    close(y.dense(), whole.movedim(1, -1))
    with pytest.raises(NotImplementedError, match="loses voxels"):
        conv(3, 4, 2)(x)


def test_norms_activations_and_pooling() -> None:
    x = sparse(4)
    own = [x.C[:, 0] == batch for batch in range(2)]
    norm = spnn.GroupNorm(2, 4).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    expected = torch.empty_like(x.F)
    for mask in own:
        rows = mask.nonzero()[:, 0]
        values = F.group_norm(x.F[rows].T[None], 2, norm.weight, norm.bias)[0].T
        expected = expected.index_put([rows], values)
    same(norm(x).F, expected, [x.F, norm.weight, norm.bias])
    batch_norm = spnn.BatchNorm(4).double().eval()
    assert "running_mean" in batch_norm.state_dict()
    close(batch_norm(x).F, x.F / (1 + batch_norm.eps) ** 0.5)
    close(spnn.ReLU(True)(fapply(x, torch.clone)).F, x.F.relu())
    close(spf.leaky_relu(fapply(x, torch.clone)).F, F.leaky_relu(x.F, 0.1))
    same(spnn.GlobalAvgPool()(x), torch.stack([x.F[mask].mean(0) for mask in own]), [x.F])
    same(spnn.GlobalMaxPool()(x), torch.stack([x.F[mask].amax(0) for mask in own]), [x.F])
    cropped = spnn.SparseCrop((0, 2, 0), (2, 5, 9))(x)
    kept = (x.C[:, 1] >= 2) & (x.C[:, 1] < 5)
    assert torch.equal(cropped.C, x.C[kept])  # by the first three columns, as there
    close(cropped.F, x.F[kept])


def test_tensors_together() -> None:
    x = sparse()
    y = x.with_features(rand(*x.F.shape))
    close(torchsparse.cat([x, y]).F, torch.cat([x.F, y.F], 1))
    close((x + y).F, x.F + y.F)
    other = SparseTensor(rand(4, 3), torch.cat([x.C[:3], torch.tensor([[0, 9, 9, 9]]).int()]))
    both = torchsparse.generative_add(x, other)
    assert torch.equal(both.C, torch.cat([x.C, other.C]).unique(dim=0))
    close(dense(both, (10, 10, 10)), dense(x, (10, 10, 10)) + dense(other, (10, 10, 10)))


def fnv(row: list[int]) -> int:
    """FNV-1a of four words, of which the upper four bits are folded into the rest."""
    number = 14695981039346656037
    for word in row:
        number = ((number ^ (word % 2**32)) * 1099511628211) % 2**64
    return (number >> 60) ^ (number % 2**60)


def test_hashes_and_rows_by_them() -> None:
    rows = torch.tensor([[0, 1, 2, 0], [5, 6, 7, 1], [-3, 4, -(2**31), 2**31 - 1]]).int()
    assert spf.sphash(rows).tolist() == [fnv(row) for row in rows.tolist()]
    moves = get_kernel_offsets(2)
    assert moves.tolist() == [list(p) for p in itertools.product((0, 1), repeat=3)]
    moved = [
        [fnv([*map(sum, zip(row[:3], move, strict=True)), row[3]]) for row in rows[:2].tolist()]
        for move in moves.tolist()
    ]
    assert spf.sphash(rows[:2], moves).tolist() == moved
    known = spf.sphash(rows)
    found = spf.sphashquery(torch.stack([known.flip(0), known + 1]), known)
    assert found.tolist() == [[2, 1, 0], [-1, -1, -1]]
    odd = get_kernel_offsets((3, 1, 3), stride=2)
    assert odd[:4].tolist() == [[-2, 0, -2], [0, 0, -2], [2, 0, -2], [-2, 0, 0]]


def test_a_table_of_coordinates() -> None:
    x = sparse()
    table = backend.GPUHashTable(torch.zeros(9), torch.zeros(9))
    table.insert_coords(x.C[:, [1, 2, 3, 0]])
    known = {tuple(row): i for i, row in enumerate(x.C.tolist())}
    ones = torch.ones(3).int()
    queries = torch.cat([x.C[:9], x.C[:9] + 1])[:, [1, 2, 3, 0]]
    for size, start in ((2, 0), (3, -1)):
        found = table.lookup_coords(queries, ones * size, ones, size**3) - 1
        assert found.dtype == torch.int32
        steps = itertools.product(range(start, start + size), repeat=3)
        ordered = [step if size == 2 else step[::-1] for step in steps]
        for row, own in zip(queries.tolist(), found.tolist(), strict=True):
            places = [(row[3], *map(sum, zip(row[:3], step, strict=True))) for step in ordered]
            assert own == [known.get(place, -1) for place in places]
    hashes = spf.sphash(x.C)
    table.insert_vals(hashes)
    assert table.lookup_vals(hashes[:3]).tolist() == [1, 2, 3]


def test_from_points_to_voxels_and_back() -> None:
    x = sparse()
    points = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).double() * 6
    known = {tuple(row): i for i, row in enumerate(x.C.tolist())}
    rows, weights = [], []
    for point in points.tolist():
        start = [int(np.floor(value)) for value in point]
        places = [[a + b for a, b in zip(start, c, strict=True)] for c in np.ndindex(2, 2, 2)]
        rows.append([known.get((0, *place), -1) for place in places])
        near = [np.prod([1 - abs(a - b) for a, b in zip(point, p, strict=True)]) for p in places]
        near = [w if row >= 0 else 0.0 for w, row in zip(near, rows[-1], strict=True)]
        weights.append([w / (sum(near) + 1e-8) for w in near])
    index = torch.tensor(rows)
    found = spf.calc_ti_weights(points, index)
    close(found, torch.tensor(weights))
    wide = spf.calc_ti_weights(points * 4, index, scale=4)
    close(wide, found)
    expected = (torch.cat([x.F, x.F.new_zeros(1, 3)])[index] * found[..., None]).sum(1)
    same(spf.spdevoxelize(x.F, index.int(), found), expected, [x.F])
    voxel = torch.tensor([0, 2, 2, -1, 0, 2]).int()
    count = spf.spcount(voxel, 4)
    assert count.tolist() == [2, 0, 3, 0]
    features = rand(6, 3).requires_grad_()
    total = torch.stack(
        [features[[0, 4]].mean(0), features[0] * 0, features[[1, 2, 5]].mean(0), features[0] * 0]
    )
    same(spf.spvoxelize(features, voxel, count), total, [features])


def test_inputs_are_made_as_there() -> None:
    points = np.array([[0.1, 0.1, 0.9], [2.0, 0.0, 0.0], [0.2, 0.0, 0.8]])
    voxels, index, inverse = sparse_quantize(points, 0.5, return_index=True, return_inverse=True)
    assert voxels.tolist() == [[0, 0, 1], [4, 0, 0]]
    assert index.tolist() == [0, 1]
    assert inverse.tolist() == [0, 1, 0]
    one = SparseTensor(torch.ones(2, 1), torch.tensor(voxels))
    batch = sparse_collate_fn([{"x": one, "n": 1, "a": np.ones(2)}] * 2)
    assert batch["x"].C[:, 0].tolist() == [0, 0, 1, 1]
    assert batch["a"].shape == (2, 2)
    assert batch["n"] == [1, 1]


def test_a_cache_that_is_shared() -> None:
    modes = tensor_cache.TensorCacheMode
    tensor_cache.set_tensor_cache_mode(modes.GLOBAL_TENSOR_CACHE)
    try:
        assert sparse()._caches is sparse()._caches
    finally:
        tensor_cache.set_tensor_cache_mode(modes.SEPARATE_TENSOR_CACHE)
        tensor_cache.clear_global_tensor_cache()
    assert sparse()._caches is not sparse()._caches


def test_what_has_no_form_says_so() -> None:
    config = spf.get_default_conv_config()
    config.kmap_mode = "hashmap"
    for call, message in (
        (lambda: spnn.Conv3d(3, 3, 3, dilation=2), "leaves out"),
        (lambda: spnn.Conv3d(3, 3, 2, 2, transposed=True, generative=True), "generative"),
        (lambda: spnn.Conv3d(3, 3, 3, config=config), "kmap_mode"),
        (lambda: set_allow_negative_coordinates(True), "none is negative"),
        (lambda: spf.spdownsample(None), "spdownsample"),
        (lambda: backend.hash_cuda(None), "hash_cuda"),
        (lambda: torchsparse.tune(None), "tune"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    spf.set_global_conv_config(config)
    try:
        with pytest.raises(NotImplementedError, match="kmap_mode"):
            spf.conv3d(sparse(), torch.ones(27, 3, 3), 3)
    finally:
        spf.clear_global_conv_config()


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a repository has Python code of packages whose extensions are not compiled."""
    for package, extension in (("torchsparse", "torchsparse.backend"), ("MinkowskiEngine", "_C")):
        (tmp_path / package / "backend").mkdir(parents=True)
        (tmp_path / package / "backend" / "sources.cu").write_text("")
        (tmp_path / package / "__init__.py").write_text(f"import {extension}\nTHEIRS = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [
        n for n in sys.modules if n.partition(".")[0] in ("torchsparse", "MinkowskiEngine")
    ]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["torchsparse", "MinkowskiEngine"])
def test_a_repository_whose_extension_is_not_compiled_is_not_there(beside: Path, name: str) -> None:
    with shims.installed("auto") as used:
        assert importlib.import_module(name).__version__
    assert used == [name]
    (beside / "_C.py").write_text("")
    (beside / "MinkowskiEngineBackend.py").write_text("")
    (beside / "torchsparse" / "backend.py").write_text("")
    importlib.invalidate_caches()
    (beside / "torchsparse" / "backend" / "sources.cu").unlink()
    (beside / "torchsparse" / "backend").rmdir()
    with shims.installed("auto") as used:
        assert importlib.import_module(name).THEIRS
    assert used == []
