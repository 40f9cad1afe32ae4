"""The stand-ins for PointNet++'s extension and its kin, against their definitions."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs

with shims.installed(shims.SHIMS):
    import chamfer
    import knn_cuda
    import pointnet2_batch_cuda
    import pointnet2_cuda
    from pointnet2_ops import _ext, pointnet2_modules, pointnet2_utils

NET = """
from torch import nn
from pointnet2_ops.pointnet2_modules import PointnetFPModule, PointnetSAModule

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.few = PointnetSAModule(mlp=[2, 8], npoint=6, radius=1.2, nsample=4)
        self.all = PointnetFPModule(mlp=[10, 4])

    def forward(self, xyz, features):
        near, found = self.few(xyz, features)
        return self.all(xyz, near, features, found)
"""


@pytest.fixture(autouse=True)
def _the_same_points_each_time() -> None:
    torch.manual_seed(0)


def cloud(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def furthest(points: list[list[float]], count: int, padded: bool = True) -> list[int]:
    distance = [-1.0 if padded and sum(x * x for x in p) <= 1e-3 else 1e10 for p in points]
    found = [0]
    while len(found) < count:
        for i, p in enumerate(points):
            distance[i] = min(distance[i], math.dist(p, points[found[-1]]) ** 2)
        found.append(max(range(len(points)), key=lambda i: distance[i]))
    return found


def test_furthest_points() -> None:
    xyz = cloud(3, 40, 3)
    xyz[1, 7:12] = 0.01  # padding: never chosen
    xyz[2] = 0  # nothing else: point 0
    found = pointnet2_utils.furthest_point_sample(xyz, 38)  # more than the points of the second
    assert found.dtype == torch.int32
    assert found.tolist() == [furthest(points.tolist(), 38) for points in xyz]
    assert not set(found[1].tolist()) & set(range(7, 12))


def test_balls() -> None:
    xyz, centers = cloud(2, 30, 3), cloud(2, 5, 3)
    centers[1, 3] = 50  # none is near
    found = pointnet2_utils.ball_query(1.1, 4, xyz, centers)
    assert found.shape == (2, 5, 4)
    assert found.dtype == torch.int32
    counts = set()
    for b in range(2):
        for m in range(5):
            near = [i for i in range(30) if math.dist(xyz[b, i], centers[b, m]) < 1.1][:4]
            counts.add(len(near))
            filled = near + [near[0] if near else 0] * (4 - len(near))
            assert found[b, m].tolist() == filled
    assert {0, 4} < counts
    few = pointnet2_utils.ball_query(100.0, 8, xyz[:, :3], centers)  # more than there are
    assert few[0, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_three_nearest_and_what_is_interpolated() -> None:
    unknown, known = cloud(2, 7, 3).requires_grad_(), cloud(2, 5, 3).requires_grad_()
    distance, index = pointnet2_utils.three_nn(unknown, known)
    assert not distance.requires_grad
    assert index.dtype == torch.int32
    from_, to = unknown.tolist(), known.tolist()
    for b in range(2):
        for n in range(7):
            order = sorted(range(5), key=lambda i: math.dist(from_[b][n], to[b][i]))[:3]
            assert index[b, n].tolist() == order
            there = [math.dist(from_[b][n], to[b][i]) for i in order]
            torch.testing.assert_close(distance[b, n].tolist(), there)
    features, weight = cloud(2, 4, 5).requires_grad_(), cloud(2, 7, 3).requires_grad_()
    found = pointnet2_utils.three_interpolate(features, index, weight)
    place = index.long()
    for b in range(2):
        by_hand = torch.stack(
            [features[b][:, i] @ w for i, w in zip(place[b], weight[b], strict=True)], 1
        )
        torch.testing.assert_close(found[b], by_hand)
    cotangent = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, features, cotangent)
    torch.testing.assert_close(_ext.three_interpolate_grad(cotangent, index, weight, 5), grad)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3)])
def test_features_are_gathered(shape: tuple[int, ...]) -> None:
    features = cloud(2, 4, 9).requires_grad_()
    index = torch.randint(9, shape, dtype=torch.int32)
    gather = (
        pointnet2_utils.gather_operation if len(shape) == 2 else pointnet2_utils.grouping_operation
    )
    found = gather(features, index)
    expected = torch.stack([features[b][:, index[b].long()] for b in range(2)])
    assert torch.equal(found, expected)
    cotangent = torch.randn_like(found)
    (grad,) = torch.autograd.grad(expected, features, cotangent)
    torch.testing.assert_close(_ext.group_points_grad(cotangent, index, 9), grad)


@pytest.mark.parametrize("transposed", [False, True])
def test_neighbours(transposed: bool) -> None:
    ref, query = cloud(2, 20, 3), cloud(2, 6, 3)
    given = (ref, query) if transposed else (ref.mT, query.mT)
    distance, index = knn_cuda.KNN(5, transpose_mode=transposed)(*given)
    if not transposed:
        distance, index = distance.mT, index.mT
    expected = torch.cdist(query, ref).sort(-1)
    torch.testing.assert_close(distance, expected.values[..., :5])
    assert torch.equal(index, expected.indices[..., :5])
    alone = knn_cuda.knn(ref[0].T, query[0].T, 5)
    assert torch.equal(alone[0], distance[0].T)
    assert torch.equal(alone[1], index[0].T)


def test_what_writes_to_its_arguments() -> None:
    assert pointnet2_cuda.__all__ == pointnet2_batch_cuda.__all__
    ops, empty = pointnet2_batch_cuda, torch.empty
    xyz, features = cloud(2, 30, 3), cloud(2, 4, 30)
    xyz[1, 7:12] = 0.01  # no padding here
    every = empty(2, 30, dtype=torch.int32)
    ops.furthest_point_sampling_wrapper(2, 30, 30, xyz, empty(2, 30), every)
    assert every.tolist() == [furthest(points.tolist(), 30, padded=False) for points in xyz]
    index = empty(2, 8, dtype=torch.int32)
    ops.furthest_point_sampling_wrapper(2, 30, 8, xyz, empty(2, 30), index)
    assert index.tolist() == [furthest(points.tolist(), 8, padded=False) for points in xyz]
    centers = torch.stack([xyz[b, index[b].long()] for b in range(2)])
    places, grouped = empty(2, 8, 5, dtype=torch.int32), empty(2, 4, 8, 5, dtype=torch.float64)
    ops.ball_query_wrapper(2, 30, 8, 1.1, 5, centers, xyz, places)
    assert torch.equal(places, pointnet2_utils.ball_query(1.1, 5, xyz, centers))
    ops.group_points_wrapper(2, 4, 30, 8, 5, features, places, grouped)
    assert torch.equal(grouped, pointnet2_utils.grouping_operation(features, places))
    few = empty(2, 4, 8, dtype=torch.float64)
    ops.gather_points_wrapper(2, 4, 30, 8, features, index, few)
    assert torch.equal(few, pointnet2_utils.gather_operation(features, index))
    squared, near = empty(2, 30, 3, dtype=torch.float64), empty(2, 30, 3, dtype=torch.int32)
    ops.three_nn_wrapper(2, 30, 8, xyz, centers, squared, near)
    distance, expected = pointnet2_utils.three_nn(xyz, centers)
    assert torch.equal(near, expected)
    torch.testing.assert_close(squared.sqrt(), distance)
    weight, back = cloud(2, 30, 3), empty(2, 4, 30, dtype=torch.float64)
    ops.three_interpolate_wrapper(2, 4, 8, 30, few, near, weight, back)
    assert torch.equal(back, pointnet2_utils.three_interpolate(few, near, weight))
    before = torch.ones_like(features)
    for add, at, cotangent in (
        (ops.group_points_grad_wrapper, places, torch.randn_like(grouped)),
        (ops.gather_points_grad_wrapper, index, torch.randn_like(few)),
    ):
        of = before.clone()
        add(2, 4, 30, *at.shape[1:], cotangent, at, of)
        torch.testing.assert_close(of - before, _ext.gather_points_grad(cotangent, at, 30))
    of = torch.ones_like(few)
    ops.three_interpolate_grad_wrapper(2, 4, 30, 8, back, near, weight, of)
    torch.testing.assert_close(of - 1, _ext.three_interpolate_grad(back, near, weight, 8))


def test_chamfer_distance() -> None:
    one, other = cloud(2, 9, 3).requires_grad_(), cloud(2, 6, 3).requires_grad_()
    *found, of_one, of_other = chamfer.forward(one, other)
    squared = torch.cdist(one, other).square()
    expected = squared.amin(2), squared.amin(1)
    torch.testing.assert_close(found, list(expected))
    assert torch.equal(of_one.long(), squared.argmin(2))
    assert torch.equal(of_other.long(), squared.argmin(1))
    cotangents = [torch.randn_like(t) for t in found]
    grads = torch.autograd.grad(expected, (one, other), cotangents)
    torch.testing.assert_close(
        chamfer.backward(one, other, of_one, of_other, *cotangents), list(grads)
    )


def test_several_scales_and_all_points_as_one() -> None:
    channels = [[2, 4, 5], [2, 6]]
    layer = pointnet2_modules.PointnetSAModuleMSG(
        3, [0.8, 1.5], [4, 8], channels, bn=False
    ).double()
    assert channels == [[5, 4, 5], [5, 6]]
    assert [name for name, _ in layer.named_parameters()][:2] == [
        "mlps.0.0.weight",
        "mlps.0.0.bias",
    ]
    xyz, features = cloud(2, 30, 3), cloud(2, 2, 30)
    centers, found = layer(xyz, features)
    index = pointnet2_utils.furthest_point_sample(xyz, 3).long()
    assert torch.equal(centers, torch.stack([xyz[b, index[b]] for b in range(2)]))
    assert found.shape == (2, 11, 3)
    alone = pointnet2_modules.PointnetSAModule([2, 7], bn=False).double()
    nothing, pooled = alone(xyz, features)
    whole = torch.cat([xyz.mT, features], 1)
    by_hand = torch.relu(
        alone.mlps[0][0].weight[..., 0, 0] @ whole + alone.mlps[0][0].bias[:, None]
    )
    assert nothing is None
    torch.testing.assert_close(pooled[..., 0], by_hand.amax(-1))


def test_layers_hold_in_onnx(tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]) -> None:
    torch.manual_seed(0)
    layers = {
        "few": pointnet2_modules.PointnetSAModule(mlp=[2, 8], npoint=6, radius=1.2, nsample=4),
        "all": pointnet2_modules.PointnetFPModule(mlp=[10, 4]),
    }
    checkpoint, model = saved_with(NET, **layers)
    inputs = parse_inputs(["xyz:[batch,n,3]", "features:[batch,2,n]"])
    options = {"model": model, "inputs": inputs, "shim": "auto", "format": ["onnx"]}
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    passed = {row.runtime for row in report.results if row.verdict == "pass"}
    assert passed >= {"eager", "onnx_reference", "onnxruntime"}
