"""The stand-ins for the extensions of fast-transformers, against their sums, key by key."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import causal_product_cpu
    import causal_product_cuda
    import local_product_cpu
    import local_product_cuda


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def close(found: tuple[Tensor, ...] | list[Tensor], right: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("extension", [causal_product_cpu, causal_product_cuda])
@pytest.mark.parametrize("steps", [1, 6, 70])
def test_causal_products(steps: int, extension: Any) -> None:
    q, k, v = rand(2, 3, steps, 4), rand(2, 3, steps, 4), rand(2, 3, steps, 5)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = (q @ k.mT).tril() @ v
    product = torch.zeros(2, 3, steps, 5, dtype=torch.float64)
    assert extension.causal_dot_product(q, k, v, product) is None
    torch.testing.assert_close(product, expected)
    cotangent = rand(*expected.shape)
    right = torch.autograd.grad(expected, leaves, cotangent)
    close(torch.autograd.grad(product, leaves, cotangent), right)
    rooms = [torch.zeros_like(t) for t in leaves]
    extension.causal_dot_backward(q, k, v, cotangent, *rooms)
    close(rooms, right)


def placed(steps: int, keys: int, context: int) -> list[tuple[int, int, int]]:
    """A query's step, the key's, and its place in the window."""
    return [
        (at, s, s - at + context // 2)
        for at in range(steps)
        for s in range(at - context // 2, at + (context + 1) // 2)
        if 0 <= s < keys
    ]


@pytest.mark.parametrize("extension", [local_product_cpu, local_product_cuda])
@pytest.mark.parametrize("context", [1, 4, 5])
@pytest.mark.parametrize(("steps", "keys"), [(1, 1), (6, 6), (6, 4), (3, 8)])
def test_local_products(steps: int, keys: int, context: int, extension: Any) -> None:
    q, k = rand(2, 3, steps, 4).requires_grad_(), rand(2, 3, keys, 4).requires_grad_()
    mask, lengths = rand(steps, keys), torch.tensor([keys, max(keys - 2, 0)])
    expected = torch.full((2, 3, steps, context), -1e24, dtype=torch.float64)
    for n in range(2):
        for at, s, place in placed(steps, int(lengths[n]), context):
            expected[n, :, at, place] = (q[n, :, at] * k[n, :, s]).sum(-1) + mask[at, s]
    scores = extension.local_dot_product(q, k, mask, lengths, context)
    torch.testing.assert_close(scores, expected)
    cotangent = rand(*scores.shape)
    right = torch.autograd.grad(expected, [q, k], cotangent)
    close(torch.autograd.grad(scores, [q, k], cotangent), right)
    close(extension.local_dot_backward(q, k, lengths, cotangent, context), right)


@pytest.mark.parametrize("extension", [local_product_cpu, local_product_cuda])
@pytest.mark.parametrize("context", [1, 4, 5])
@pytest.mark.parametrize(("steps", "keys"), [(1, 1), (6, 6), (6, 4), (3, 8)])
def test_local_averages(steps: int, keys: int, context: int, extension: Any) -> None:
    weights = rand(2, 3, steps, context).requires_grad_()
    values = rand(2, 3, keys, 4).requires_grad_()
    expected = torch.zeros(2, 3, steps, 4, dtype=torch.float64)
    for at, s, place in placed(steps, keys, context):
        expected[:, :, at] += weights[:, :, at, place, None] * values[:, :, s]
    out = extension.local_weighted_average(weights, values)
    torch.testing.assert_close(out, expected)
    cotangent = rand(*out.shape)
    right = torch.autograd.grad(expected, [weights, values], cotangent)
    close(torch.autograd.grad(out, [weights, values], cotangent), right)
    found = extension.local_weighted_average_backward(weights, values, cotangent)
    close(found, right)


def test_what_chooses_keys_says_so_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fast_transformers" / "hashing"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("from .hash_cpu import compute_hashes\n")
    monkeypatch.syspath_prepend(tmp_path)
    with shims.installed() as used:
        hashing = importlib.import_module("fast_transformers.hashing")
    assert used == ["fast_transformers.hashing.hash_cpu"]
    with pytest.raises(NotImplementedError, match="fast_transformers' compute_hashes was called"):
        hashing.compute_hashes(torch.ones(2))


# As the package's own functions are: the causal one passes the data of its tensors alone.
CODE = """
import torch
from causal_product_cpu import causal_dot_backward, causal_dot_product
from local_product_cpu import local_dot_backward, local_dot_product
from local_product_cpu import local_weighted_average
from torch import nn


class Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V):
        ctx.save_for_backward(Q, K, V)
        product = torch.zeros((*Q.shape[:3], V.shape[3]), device=Q.device)
        causal_dot_product(Q.data, K.data, V.data, product)
        return product

    @staticmethod
    def backward(ctx, grad_out):
        Q, K, V = ctx.saved_tensors
        rooms = [torch.zeros_like(t) for t in (Q, K, V)]
        causal_dot_backward(Q.data, K.data, V.data, grad_out, *rooms)
        return tuple(rooms)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 18)
        self.second = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.first(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        x = Causal.apply(q, k, v).transpose(1, 2).flatten(2)
        q, k, v = self.second(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        lengths = torch.full((x.shape[0],), x.shape[1])
        mask = torch.zeros(x.shape[1], x.shape[1])
        weights = local_dot_product(q, k, mask, lengths, 3).softmax(-1)
        return local_weighted_average(weights, v).transpose(1, 2).flatten(2)
"""


def test_a_model_of_both_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {"first": torch.nn.Linear(6, 18), "second": torch.nn.Linear(6, 18)}
    checkpoint, model = saved_with(CODE, **parts)
    bundle, report = verified(
        tmp_path / "b",
        (checkpoint, model),
        ["x:[batch,length,6]"],
        ["causal_product_cpu", "local_product_cpu"],
    )
    assert "fuseport::ssd_chunk_scan_discrete" in bundle.manifest["ops"]
    rows = [row for row in report.results if row.verdict == "pass"]
    assert {"run", "own backward"} <= {row.way for row in rows}
