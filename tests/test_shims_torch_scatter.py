"""The stand-in for torch_scatter, group by group, values and gradients; and an export."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import torch_scatter as ts
    from torch_scatter import composite, utils

INDEX = torch.tensor([2, 0, 2, 4, 0, 2])
SORTED = torch.tensor([0, 0, 2, 2, 2, 4])
STARTS = torch.tensor([0, 2, 2, 5, 5, 6])
SIZE = 6

One = Callable[[Tensor], Tensor]
"""Of the values of a group, (k, …), what is returned for it, (…)."""


def std(x: Tensor) -> Tensor:
    centred = x - x.sum(0) / len(x)
    return (centred.square().sum(0) / (max(len(x) - 1, 1) + 1e-6)).sqrt()


# What a group gives, and what a group with nothing in it gives.
EACH: dict[str, tuple[One, float]] = {
    "sum": (lambda x: x.sum(0), 0.0),
    "mean": (lambda x: x.sum(0) / len(x), 0.0),
    "mul": (lambda x: math.prod(x.unbind()), 1.0),
    "min": (lambda x: torch.stack(x.unbind()).sort(0).values[0], 0.0),
    "max": (lambda x: torch.stack(x.unbind()).sort(0).values[-1], 0.0),
    "std": (std, 0.0),
    "logsumexp": (lambda x: x.exp().sum(0).log(), 0.0),
}
SEGMENTS = ("sum", "mean", "min", "max")


def by_group(src: Tensor, index: Tensor, size: int, name: str) -> Tensor:
    """(n, …) by (n,): (size, …)."""
    one, empty = EACH[name]
    found = []
    for group in range(size):
        rows = [row for row, of in zip(src, index.tolist(), strict=True) if of == group]
        found.append(one(torch.stack(rows)) if rows else torch.full_like(src[0], empty))
    return torch.stack(found)


def same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    """Values, and gradients of `leaves`."""
    close(found, expected)
    cotangent = rand(*expected.shape)
    pair = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (found, expected)]
    for one, other in zip(*pair, strict=True):
        close(one, other)


def function(name: str) -> Callable[..., Any]:
    found = getattr(ts, f"scatter_{name}")
    return (lambda *args, **kw: found(*args, **kw)[0]) if name in ("min", "max") else found


@pytest.mark.parametrize("name", EACH)
def test_a_reduction_is_that_of_each_group(name: str) -> None:
    # Deviations of one value are 0, where a root has no gradient: groups 0 and 2 have several.
    index = INDEX[INDEX != 4] if name == "std" else INDEX
    src = rand(len(index), 3, 2).requires_grad_()
    expected = by_group(src, index, SIZE, name)
    kept = expected if name != "std" else expected[::2][:2]
    for dim, x, y in ((0, src, expected), (1, src.transpose(0, 1), expected.transpose(0, 1))):
        out = function(name)(x, index, dim, dim_size=SIZE)
        close(out, y)
        same(
            out.transpose(0, dim)[::2][:2] if name == "std" else out.transpose(0, dim), kept, [src]
        )
    last = function(name)(src.movedim(0, -1), index)
    close(last, expected.movedim(0, -1)[..., : int(index.max()) + 1])
    each = utils.broadcast(index, src, 0)
    assert each.shape == src.shape
    close(function(name)(src, each, 0, dim_size=SIZE), expected)
    if name in ("sum", "mean", "mul", "min", "max"):
        close(ts.scatter(src, index, 0, dim_size=SIZE, reduce=name), expected)


def test_places_of_the_first_of_values_that_are_alike() -> None:
    src = torch.tensor([3.0, 1.0, 5.0, 2.0, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    found, places = ts.scatter_max(src, INDEX, dim_size=SIZE)
    assert places.tolist() == [1, 6, 2, 6, 3, 6]
    assert found.tolist() == [1.0, 0.0, 5.0, 0.0, 2.0, 0.0]
    (gradient,) = torch.autograd.grad(found, src, torch.arange(1.0, 7.0).double())
    assert gradient.tolist() == [0.0, 1.0, 3.0, 5.0, 0.0, 0.0]
    found, places = ts.scatter_min(src, INDEX, dim_size=SIZE)
    assert places.tolist() == [1, 6, 0, 6, 3, 6]
    assert found.tolist() == [1.0, 0.0, 3.0, 0.0, 2.0, 0.0]
    whole, places = ts.scatter_max(torch.tensor([-3, -2, -2]), torch.tensor([1, 1, 1]))
    assert (whole.tolist(), places.tolist()) == ([0, -2], [3, 1])
    assert ts.scatter_mean(torch.tensor([-3, -2, 7]), torch.tensor([1, 1, 0])).tolist() == [7, -3]
    for least in (-torch.inf, torch.finfo(torch.float32).min):  # as the package, which begins there
        nothing = ts.scatter_max(torch.tensor([least]), torch.tensor([0]))
        assert [t.tolist() for t in nothing] == [[0.0], [1]]
    assert ts.scatter_sum(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 0).shape == (0, 2)


@pytest.mark.parametrize("name", SEGMENTS)
def test_sorted_groups_are_reduced_by_index_and_by_starts(name: str) -> None:
    src = rand(6, 3).requires_grad_()
    expected = by_group(src, SORTED, 5, name)
    same(ts.segment_coo(src, SORTED, dim_size=5, reduce=name), expected, [src])
    same(ts.segment_csr(src, STARTS, reduce=name), expected, [src])
    pair = [
        getattr(ts, f"segment_{name}_coo")(src, SORTED),
        getattr(ts, f"segment_{name}_csr")(src, STARTS),
    ]
    for found in pair:
        close(found[0] if name in ("min", "max") else found, expected)
    if name in ("min", "max"):
        assert torch.equal(pair[0][1], pair[1][1])
        assert (pair[0][1][1] == 6).all()
    # Of a batch, with starts of each entry; what is before the first and after the last is in none.
    both = torch.stack([STARTS, torch.tensor([1, 1, 3, 3, 4, 5])])
    batch = torch.stack([src, rand(6, 3)]).requires_grad_()
    second = torch.tensor([9, 1, 1, 3, 4, 9])
    pairs = zip(batch, (SORTED, second), strict=True)
    expected = torch.stack([by_group(entry, of, 5, name) for entry, of in pairs])
    same(ts.segment_csr(batch, both, reduce=name), expected, [batch])
    shared = torch.stack([by_group(entry, SORTED, 5, name) for entry in batch])
    same(ts.segment_csr(batch, STARTS[None], reduce=name), shared, [batch])
    same(ts.segment_coo(batch, SORTED[None], reduce=name), shared, [batch])
    out = torch.zeros(5, 3).double()
    assert ts.segment_csr(src, STARTS, out, name) is out
    close(out, shared[0])


def test_groups_are_handed_out() -> None:
    src = rand(5, 3).requires_grad_()
    expected = torch.stack([src[group] for group in SORTED.tolist()])
    same(ts.gather_coo(src, SORTED), expected, [src])
    same(ts.gather_csr(src, STARTS), expected, [src])
    out = torch.zeros(6, 3).double()
    assert ts.gather_csr(src, STARTS, out) is out
    close(out, expected)
    batch = torch.stack([src, 2 * src])
    same(ts.gather_coo(batch, SORTED[None]), torch.stack([expected, 2 * expected]), [src])


def test_softmax_within_groups() -> None:
    src = (30 * rand(6, 3)).requires_grad_()
    sums = by_group(src.exp(), INDEX, SIZE, "sum")[INDEX]
    same(ts.scatter_softmax(src, INDEX, 0), src.exp() / sums, [src])
    close(ts.scatter_softmax(src.T, INDEX, dim_size=9).T, src.exp() / sums)
    same(composite.scatter_log_softmax(src, INDEX, 0, eps=0.0), src - sums.log(), [src])
    close(ts.scatter_std(src, INDEX, 0, unbiased=False)[4], torch.zeros(3).double())
    moved = ts.scatter_logsumexp(src, INDEX, 0, eps=1e-12)
    assert (moved[1] == 0).all()


def test_what_is_given_is_added_to() -> None:
    src, base = rand(6, 3), rand(5, 3)
    out = base.clone()
    assert ts.scatter(src, INDEX, 0, out, reduce="add") is out
    close(out, base + by_group(src, INDEX, 5, "sum"))
    out = base.clone()
    assert ts.scatter_mean(src, INDEX, 0, out) is out
    counts = torch.tensor([2.0, 1, 3, 1, 1]).double()[:, None]
    close(out, (base + by_group(src, INDEX, 5, "sum")) / counts)
    for name in ("mul", "min", "max"):
        with pytest.raises(NotImplementedError, match=f"scatter_{name} was called with out"):
            ts.scatter(src, INDEX, 0, out, reduce=name)
    with pytest.raises(NotImplementedError, match="logaddexp"):
        ts.scatter_logsumexp(src, INDEX, 0, out)
    with pytest.raises(ValueError, match="no reduction 'median'"):
        ts.scatter(src, INDEX, 0, reduce="median")
    with pytest.raises(ValueError, match=r"src is torch\.int64"):
        ts.scatter_softmax(INDEX, INDEX)


CODE = """
import torch
from torch import nn
from torch_scatter import scatter, scatter_max, scatter_min, scatter_softmax, segment_csr
from torch_scatter.composite import scatter_logsumexp, scatter_std


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge = nn.Linear(8, 4)
        self.out = nn.Linear(20, 3)

    def forward(self, x, edges):
        source, target = edges
        message = self.edge(torch.cat([x[source], x[target]], -1))
        count = x.shape[0]
        alpha = scatter_softmax(message[:, 0], target, dim_size=count)
        total = scatter(alpha[:, None] * message, target, 0, dim_size=count, reduce="add")
        largest, place = scatter_max(message, target, 0, dim_size=count)
        least = scatter_min(message, target, 0, dim_size=count)[0]
        mean = scatter(message, target, 0, dim_size=count, reduce="mean")
        spread = scatter_logsumexp(message, target, 0, dim_size=count)
        y = self.out(torch.cat([total, largest, least, mean, spread], -1))
        whole = torch.stack([torch.zeros_like(target[0]), target[0], x.shape[0] + 0 * target[0]])
        return y, place, segment_csr(y, whole, reduce="max")
"""
BY_VALUE = """
import torch
from torch import nn
from torch_scatter import scatter_mean, scatter_max


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x, graph):
        return self.out(scatter_mean(x, graph, 0)), scatter_max(x, graph, 0)[0].sum(0)
"""


@pytest.mark.parametrize("by", ["size", "value"])
def test_a_model_that_imports_torch_scatter_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]], by: str
) -> None:
    """With sizes that are given, and with as many groups as there are by the values of an index."""
    torch.manual_seed(0)
    if by == "size":
        checkpoint, model = saved_with(CODE, edge=nn.Linear(8, 4), out=nn.Linear(20, 3))
        inputs = ["x:[nodes,4]", "edges:int64[2,count]<nodes"]
    else:
        checkpoint, model = saved_with(BY_VALUE, out=nn.Linear(4, 3))
        inputs = ["x:[nodes,4]", "graph:int64[nodes]<5"]
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=parse_inputs(inputs),
        format=["torchscript", "onnx"],
    )
    assert bundle.manifest["architecture"]["config"]["shims"] == ["torch_scatter"]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    ways = {(row.runtime, row.program) for row in report.results if row.verdict == "pass"}
    for runtime in ("eager", "torchscript", "onnxruntime"):
        assert {(runtime, "forward"), (runtime, "gradient")} <= ways
