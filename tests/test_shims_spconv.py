"""The stand-in for spconv against dense convolutions, values and gradients."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import spconv as package
    import spconv.pytorch as spconv
    from spconv import utils
    from spconv.pytorch import functional, ops, tables
    from spconv.pytorch import modules as parts
    from spconv.pytorch.conv import SparseConvolution
    from spconv.pytorch.hash import HashTable
    from spconv.pytorch.utils import PointToVoxel, gather_features_by_pc_voxel_id

BATCH = 2
SHAPES = {1: [23], 2: [7, 9], 3: [5, 6, 7], 4: [3, 4, 4, 5]}
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
# Of each dimension: size, stride, padding, dilation.
WINDOWS: list[tuple[Any, Any, Any, Any]] = [
    (3, 2, 1, 1),
    (2, 2, 0, 1),
    (3, 1, 0, 1),
    (3, 3, 2, 2),
    (1, 2, 0, 1),
]
MIXED = ((3, 1, 2), (1, 2, 3), (0, 0, 1), (2, 1, 1))


def sparse(d: int, channels: int = 3, share: float = 0.2) -> Any:
    """Voxels in no order, with features that have gradients."""
    generator = torch.Generator().manual_seed(d)
    places = (torch.rand(BATCH, *SHAPES[d], generator=generator) < share).nonzero().int()
    places = places[torch.randperm(len(places), generator=generator)]
    features = rand(len(places), channels).requires_grad_()
    return spconv.SparseConvTensor(features, places, SHAPES[d], BATCH)


def dense(x: Any) -> Tensor:
    """(b, c, …) written voxel by voxel."""
    volume = x.features.new_zeros(BATCH, *x.spatial_shape, x.features.shape[1])
    places = [column.long() for column in x.indices.unbind(1)]
    return volume.index_put(places, x.features).movedim(-1, 1)


def at(volume: Tensor, indices: Tensor) -> Tensor:
    """(n, c) of (b, c, …)."""
    return volume.movedim(1, -1)[tuple(indices.long().unbind(1))]


def kernel(layer: Any, axes: str = "oi") -> Tensor:
    """The weight as torch's convolutions have it."""
    weight = layer.weight.movedim(-1, 1)
    return weight if axes == "oi" else weight.transpose(0, 1)


def same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    close(found, expected)
    cotangent = rand(*expected.shape)
    pair = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (found, expected)]
    for one, other in zip(*pair, strict=True):
        close(one, other)


def layer(kind: str, d: int, *arguments: Any, **named: Any) -> Any:
    torch.manual_seed(0)
    return getattr(spconv, f"{kind}{d}d")(*arguments, **named).double()


def windows(d: int) -> list[tuple[Any, Any, Any, Any]]:
    return [*WINDOWS, MIXED] if d == 3 else WINDOWS


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_submanifold_convolution_is_the_dense_one_read_at_its_voxels(
    d: int, dilation: int
) -> None:
    x = sparse(d)
    conv = layer("SubMConv", d, 3, 4, 3, stride=2, padding=5, dilation=dilation, indice_key="s")
    y = conv(x)
    expected = CONV[d](dense(x), kernel(conv), conv.bias, padding=dilation, dilation=dilation)
    assert y.indices is x.indices
    assert y.spatial_shape == x.spatial_shape
    same(y.features, at(expected, x.indices), [x.features, conv.weight, conv.bias])
    again = layer("SubMConv", d, 4, 5, 3, dilation=dilation, bias=False, indice_key="s")
    z = again(y)
    assert z.find_indice_pair("s") is y.find_indice_pair("s")
    expected = CONV[d](dense(y), kernel(again), padding=dilation, dilation=dilation)
    close(z.features, at(expected, x.indices))


def test_a_window_of_four_dimensions() -> None:
    x = sparse(4)
    conv = layer("SubMConv", 4, 3, 2, 3)
    places = {tuple(row): i for i, row in enumerate(x.indices.tolist())}
    for row, found in zip(x.indices.tolist(), conv(x).features, strict=True):
        expected = conv.bias.clone()
        for step in torch.ones(3, 3, 3, 3).nonzero().tolist():
            seen = (row[0], *(a + b - 1 for a, b in zip(row[1:], step, strict=True)))
            if seen in places:
                expected = expected + conv.weight[:, *step] @ x.features[places[seen]]
        close(found, expected)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_strided_convolution_is_the_dense_one_where_a_window_has_a_voxel(d: int) -> None:
    x = sparse(d)
    ones = dense(x.replace_feature(torch.ones_like(x.features[:, :1])))
    for size, stride, padding, dilation in windows(d):
        conv = layer("SparseConv", d, 3, 4, size, stride, padding, dilation, bias=False)
        y = conv(x)
        where = {"stride": stride, "padding": padding, "dilation": dilation}
        seen = CONV[d](ones, torch.ones(1, 1, *conv.kernel_size).double(), **where)
        expected = CONV[d](dense(x), kernel(conv), **where)
        assert y.spatial_shape == list(expected.shape[2:])
        assert y.indices.dtype == torch.int32
        assert torch.equal(y.indices.long(), (seen[:, 0] > 0).nonzero())  # in order
        same(y.features, at(expected, y.indices), [x.features, conv.weight])
        close(y.dense(), expected)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_an_inverse_convolution_goes_back_to_the_voxels_before(d: int) -> None:
    x = sparse(d)
    for size, stride, padding, dilation in windows(d):
        down = layer("SparseConv", d, 3, 4, size, stride, padding, dilation, indice_key="down")
        if down.conv1x1 or max(down.kernel_size) == 1:
            continue
        y = down(x)
        up = layer("SparseInverseConv", d, 4, 2, size, "down")
        z = up(y)
        assert z.indices is x.indices
        assert z.spatial_shape == x.spatial_shape
        # What strides left over at the far end belongs to no window.
        whole = TRANSPOSED[d](
            dense(y), kernel(up, "io"), stride=stride, padding=0, dilation=dilation
        )
        widths = [
            n
            for extent, got, pad in zip(
                reversed(x.spatial_shape),
                reversed(whole.shape[2:]),
                reversed(down.padding),
                strict=True,
            )
            for n in (-pad, extent + pad - got)
        ]
        expected = F.pad(whole, widths).movedim(1, -1) + up.bias
        same(
            z.features,
            at(expected.movedim(-1, 1), x.indices),
            [y.features, up.weight, up.bias],
        )


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_transposed_convolution_makes_voxels_where_it_spreads_to(d: int) -> None:
    x = sparse(d)
    for size, stride, padding in ((3, 2, 1), (2, 2, 0), (3, 1, 1)):
        conv = layer("SparseConvTranspose", d, 3, 4, size, stride, padding, indice_key="t")
        y = conv(x)
        expected = TRANSPOSED[d](dense(x), kernel(conv, "io"), stride=stride, padding=padding)
        ones = dense(x.replace_feature(torch.ones_like(x.features[:, :1])))
        window = torch.ones(1, 1, *conv.kernel_size).double()
        seen = TRANSPOSED[d](ones, window, stride=stride, padding=padding)
        assert y.spatial_shape == list(expected.shape[2:])
        assert torch.equal(y.indices.long(), (seen[:, 0] > 0).nonzero())
        expected = at(expected, y.indices) + conv.bias
        same(y.features, expected, [x.features, conv.weight, conv.bias])
        back = layer("SparseInverseConv", d, 4, 2, size, "t", bias=False)
        z = back(y)
        assert z.indices is x.indices
        gathered = CONV[d](dense(y), kernel(back), stride=stride, padding=padding)
        close(z.features, at(gathered, x.indices))


def test_a_convolution_of_one_place_takes_its_weight_as_it_lies_in_memory() -> None:
    x = sparse(3)
    for conv in (layer("SubMConv", 3, 3, 4, 1), layer("SparseConv", 3, 3, 4, 1)):
        y = conv(x)
        assert y.indices is x.indices
        expected = x.features @ conv.weight.reshape(3, 4) + conv.bias
        same(y.features, expected, [x.features, conv.weight, conv.bias])
    with pytest.raises(AssertionError, match="padding must be zero"):
        spconv.SparseConv3d(3, 4, 1, padding=1)
    # With a stride it is a convolution as any.
    strided = layer("SparseConv", 3, 3, 4, 1, 2, bias=False)
    close(strided(x).dense(), F.conv3d(dense(x), kernel(strided), stride=2))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_largest_begins_with_zeros_and_all_that_are_as_large_have_the_gradient(d: int) -> None:
    x = sparse(d, share=0.5)
    pool = layer("SparseMaxPool", d, 2, indice_key="p")
    y = pool(x)
    assert pool.stride == [2] * d
    places = {tuple(row): i for i, row in enumerate(x.indices.tolist())}
    for row, found in zip(y.indices.tolist(), y.features, strict=True):
        seen = [
            places[place]
            for step in torch.ones([2] * d).nonzero().tolist()
            if (place := (row[0], *(2 * a + b for a, b in zip(row[1:], step, strict=True))))
            in places
        ]
        close(found, x.features[seen].amax(0).clamp(min=0))
    close(
        layer("SparseInverseConv", d, 3, 2, 2, "p", bias=False)(y).features.shape[0],
        x.features.shape[0],
    )
    tied = torch.tensor([[0.0, 2.0, -1.0], [0.0, 2.0, -3.0]]).double().requires_grad_()
    at_both = torch.zeros(2, d + 1, dtype=torch.int32)
    at_both[1, -1] = 1
    out = pool(spconv.SparseConvTensor(tied, at_both, SHAPES[d], BATCH)).features
    assert out.tolist() == [[0.0, 2.0, 0.0]]
    (gradient,) = torch.autograd.grad(out, tied, torch.tensor([[3.0, 5.0, 7.0]]).double())
    assert gradient.tolist() == [[3.0, 5.0, 0.0]] * 2


def test_means_are_of_the_voxels_that_are_there() -> None:
    x = sparse(2, share=0.5)
    y = layer("SparseAvgPool", 2, 3, 2, 1)(x)
    ones = dense(x.replace_feature(torch.ones_like(x.features)))
    window = torch.ones(3, 1, 3, 3).double()
    total, count = (F.conv2d(v, window, stride=2, padding=1, groups=3) for v in (dense(x), ones))
    same(y.features, at(total, y.indices) / at(count, y.indices), [x.features])


def test_over_whole_volumes() -> None:
    x = sparse(2)
    groups = [x.features[x.indices[:, 0] == i] for i in range(BATCH)]
    same(spconv.SparseGlobalMaxPool()(x), torch.stack([g.amax(0) for g in groups]), [x.features])
    means = torch.stack([g.mean(0)[0] for g in groups])  # as spconv, the first channel's
    close(spconv.SparseGlobalAvgPool()(x), means)


def test_tensors_are_made_dense_and_sparse_again() -> None:
    x = sparse(3)
    same(x.dense(), dense(x), [x.features])
    close(x.dense(channels_first=False), dense(x).movedim(1, -1))
    close(spconv.ToDense()(x), dense(x))
    back = spconv.SparseConvTensor.from_dense(x.dense(channels_first=False))
    close(back.dense(), dense(x))
    assert back.indices.dtype == torch.int32
    assert (back.batch_size, back.spatial_shape) == (BATCH, SHAPES[3])
    some = x.select_by_index(torch.tensor([4, 1]))
    assert torch.equal(some.indices, x.indices[[4, 1]])
    close(some.features, x.features[[4, 1]])
    close((x + x).features, 2 * x.features)
    close((x + x.features).minus().features, -2 * x.features)
    assert x.spatial_size == 5 * 6 * 7
    with pytest.raises(ValueError, match="replace_feature"):
        x.features = x.features
    with pytest.raises(AssertionError, match="only support int32"):
        spconv.SparseConvTensor(x.features, x.indices.long(), SHAPES[3], BATCH)


def test_sums_of_tensors() -> None:
    x, other = sparse(3), sparse(3).select_by_index(torch.arange(5))
    other.indices = torch.cat([other.indices[:3], torch.tensor([[1, 4, 5, 6], [0, 0, 0, 0]]).int()])
    y = functional.sparse_add(x, other)
    same(y.dense(), dense(x) + dense(other), [x.features, other.features])
    close(tables.AddTableMisaligned()([x, other]).dense(), y.dense())
    close(spconv.AddTable()([x, x]).features, 2 * x.features)
    close(spconv.JoinTable()([x, x]).features, torch.cat([x.features, x.features], 1))
    both = spconv.ConcatTable().add(spconv.Identity()).add(spconv.SparseIdentity())
    assert [each.features.shape for each in both(x)] == [x.features.shape] * 2


def test_modules_of_torch_get_features_in_a_sequence() -> None:
    x = sparse(3)
    net = spconv.SparseSequential(
        layer("SubMConv", 3, 3, 4, 3), nn.BatchNorm1d(4).double(), spconv.SparseReLU()
    )
    net.add(spconv.SparseBatchNorm(4).double(), "last")
    net.add(spconv.ToDense())
    net.eval()
    expected = net[3](net[2](net[1](net[0](x).features)))
    close(net(x), dense(net[0](x).replace_feature(expected)))
    assert [name for name, _ in net.named_children()] == ["0", "1", "2", "last", "4"]
    assert len(net) == 5
    assert parts.is_spconv_module(net[-1])
    assert parts.is_sparse_conv(net[0])
    assert not parts.is_spconv_module(net[1])
    spconv.assign_name_for_sparse_modules(net)
    assert net[0]._sparse_unique_name == "0"


def test_of_voxels_that_are_alike_the_first_is_seen() -> None:
    x = sparse(3)
    twice = torch.cat([x.indices, x.indices[:4]])
    features = torch.cat([x.features, rand(4, 3)])
    doubled = spconv.SparseConvTensor(features, twice, SHAPES[3], BATCH)
    conv = layer("SparseConv", 3, 3, 4, 3, 2, 1)
    close(conv(doubled).features, conv(x).features)
    inside = layer("SubMConv", 3, 3, 4, 3)
    count = len(x.indices)
    close(inside(doubled).features[:count], inside(x).features)
    middle = inside.weight[:, 1, 1, 1]  # its own, of each
    change = (features[count:] - x.features[:4]) @ middle.T
    close(inside(doubled).features[count:], inside(x).features[:4] + change)


def test_no_voxels_and_voxels_of_other_batches() -> None:
    none = sparse(3).select_by_index(torch.arange(0))
    down = layer("SparseConv", 3, 3, 4, 3, 2, indice_key="d")
    y = down(none)
    assert y.features.shape == (0, 4)
    assert layer("SubMConv", 3, 4, 4, 3)(y).features.shape == (0, 4)
    assert layer("SparseInverseConv", 3, 4, 5, 3, "d")(y).features.shape == (0, 5)
    assert not y.dense().any()
    x = sparse(3)
    outside = x.replace_feature(x.features)
    outside.batch_size = 1
    inside = x.select_by_index(x.indices[:, 0] == 0)
    close(down(outside).features, down(inside).features)
    with pytest.raises(ValueError, match="reach zero"):
        layer("SparseConv", 3, 3, 4, 6)(x)


def test_keys_that_do_not_fit() -> None:
    x = sparse(3)
    y = layer("SparseConv", 3, 3, 4, 3, 2, indice_key="d")(x)
    for size, key, message in ((2, "d", "same kernel size"), (3, "e", "came before")):
        with pytest.raises((ValueError, AssertionError), match=message):
            layer("SparseInverseConv", 3, 4, 2, size, key)(y)
    with pytest.raises(ValueError, match="same spatial shape"):
        layer("SparseInverseConv", 3, 3, 2, 3, "d")(
            spconv.SparseConvTensor(
                x.features, x.indices, [5, 6, 8], BATCH, None, None, y.indice_dict
            )
        )
    s = layer("SubMConv", 3, 3, 3, 3, indice_key="s")(x)
    with pytest.raises(ValueError, match="same dilation"):
        layer("SubMConv", 3, 3, 3, 3, dilation=2, indice_key="s")(s)
    with pytest.raises(AssertionError, match="standard conv"):
        layer("SparseInverseConv", 3, 3, 3, 3, "s")(s)
    with pytest.raises(AssertionError, match="reuse subm"):
        layer("SparseConv", 3, 3, 3, 3, indice_key="s")(s)
    with pytest.raises(ValueError, match="odd ksize"):
        spconv.SubMConv3d(3, 3, 2)
    with pytest.raises(AssertionError, match="channel size"):
        layer("SubMConv", 3, 5, 3, 3)(x)


def test_parameters_are_those_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = spconv.SparseConv3d(3, 4, (3, 1, 2), record_voxel_count=True)
    assert isinstance(conv, SparseConvolution)
    shapes = {name: tuple(t.shape) for name, t in conv.state_dict().items()}
    count = "max_num_voxels_during_training"
    assert shapes == {"weight": (4, 3, 1, 2, 3), "bias": (4,), count: (1,)}
    # Of a checkpoint without a count, and with weights as older versions had them.
    state = conv.state_dict()
    del state[count]
    conv.load_state_dict(state)
    for layout, axes in (("RSKC", (1, 2, 3, 0, 4)), ("RSCK", (1, 2, 3, 4, 0))):
        monkeypatch.setattr(package.constants, "SAVED_WEIGHT_LAYOUT", layout)
        other = spconv.SparseConv3d(3, 4, (3, 1, 2))
        other.load_state_dict({**state, "weight": state["weight"].permute(axes)})
        close(other.weight, conv.weight)
    assert spconv.SubMConv2d(3, 4, 3, 1, 1, 1, 1, False, "key").indice_key == "key"
    assert spconv.SubMConv3d(2, 2, 3).algo is spconv.ConvAlgo.MaskImplicitGemm
    assert spconv.SubMConv3d(2, 2, 5).algo is spconv.ConvAlgo.Native


@pytest.mark.parametrize(
    "call",
    [
        lambda: utils.Point2VoxelCPU3d([1], [2]),
        lambda: PointToVoxel([0.1] * 3, [0, 1], 3, 5, 5)(torch.zeros(3, 3)),
        lambda: ops.get_indice_pairs(),
        lambda: functional.indice_conv(),
        lambda: HashTable(torch.device("cpu"), torch.int32, torch.int32),
        lambda: SparseConvolution(3, 2, 2, act_type="relu"),
    ],
)
def test_what_has_no_form_says_so_by_its_name(call: Callable[[], Any]) -> None:
    with pytest.raises(NotImplementedError, match="spconv"):
        call()


def test_extensions_that_detectors_import_beside_it_say_so_when_called() -> None:
    with shims.installed("auto") as used:
        boxes = importlib.import_module("iou3d_nms_cuda")
        pools = importlib.import_module("roiaware_pool3d_cuda")
    assert used == ["iou3d_nms_cuda", "roiaware_pool3d_cuda"]
    for call, name in ((boxes.nms_gpu, "iou3d_nms_cuda.nms_gpu"), (pools.forward, "cuda.forward")):
        with pytest.raises(NotImplementedError, match=rf"OpenPCDet's .*{name} was called"):
            call()


def test_names_of_version_1_are_not_there() -> None:
    with pytest.raises(AttributeError):
        _ = utils.VoxelGenerator
    assert float(package.__version__[2:]) >= 2.2
    ids = torch.tensor([1, -1, 0])
    found = gather_features_by_pc_voxel_id(torch.tensor([[5.0], [6.0]]), ids, 9)
    assert found.tolist() == [[6.0], [9.0], [5.0]]
