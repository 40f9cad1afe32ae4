"""The stand-ins for fused softmax of apex, Megatron-LM and OpenFold, against its definition."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import attn_core_inplace_cuda
    import generic_scaled_masked_softmax_cuda
    import scaled_masked_softmax_cuda
    import scaled_softmax_cuda
    import scaled_upper_triang_masked_softmax_cuda

SCALE = 0.35


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def by_definition(x: Tensor, hidden: Tensor, scale: float = SCALE) -> Tensor:
    """exp(scale · x) over its sum where nothing hides it, and zero elsewhere."""
    weights = (x * scale).exp() * ~hidden
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def a_mask(batch: int, q: int, k: int) -> Tensor:
    """Random, with a row that hides all."""
    mask = torch.rand(batch, 1, q, k) < 0.4
    mask[0, 0, 1] = True
    return mask


Case = tuple[Any, tuple[int, ...], Callable[[Tensor], tuple[Any, ...]], Callable[[Tensor], Tensor]]
CASES: dict[str, Case] = {
    "scaled": (
        scaled_softmax_cuda,
        (2, 3, 5, 7),
        lambda mask: (),
        lambda mask: torch.zeros(1, dtype=torch.bool),
    ),
    "causal": (
        scaled_upper_triang_masked_softmax_cuda,
        (4, 6, 6),
        lambda mask: (),
        lambda mask: torch.ones(6, 6, dtype=torch.bool).triu(1),
    ),
    "masked": (
        scaled_masked_softmax_cuda,
        (2, 3, 5, 7),
        lambda mask: (mask,),
        lambda mask: mask,
    ),
    "generic": (
        generic_scaled_masked_softmax_cuda,
        (2, 3, 5, 7),
        lambda mask: (mask.to(torch.uint8),),
        lambda mask: mask,
    ),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, batch: int) -> None:
    extension, shape, given, hidden = CASES[name]
    mask = a_mask(batch, 5, 7)
    x = rand(*shape).requires_grad_()
    expected = by_definition(x, hidden(mask))
    out = extension.forward(x, *given(mask), torch.tensor(SCALE, dtype=torch.float64))
    torch.testing.assert_close(out, expected)
    cotangent = rand(*shape)
    (right,) = torch.autograd.grad(expected, x, cotangent)
    (found,) = torch.autograd.grad(out, x, cotangent)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(extension.backward(cotangent, out, SCALE), right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_half_types_round_the_scale_and_the_result(name: str, dtype: torch.dtype) -> None:
    extension, shape, given, hidden = CASES[name]
    mask = a_mask(2, 5, 7)
    x = rand(*shape).mul(8).to(dtype)
    out = extension.forward(x, *given(mask), SCALE)
    assert out.dtype == dtype
    rounded = float(torch.tensor(SCALE, dtype=dtype))
    expected = by_definition(x.double(), hidden(mask), rounded)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert extension.backward(out, out, SCALE).dtype == dtype


def test_what_a_mask_hides_has_a_score_of_its_own() -> None:
    mask = torch.tensor([[[[True, False, False]] * 2]])
    low = torch.tensor([[[[0.0, -9999.0, -10001.0], [0.0, -20000.0, -10050.0]]]]).double()
    masked = scaled_masked_softmax_cuda.forward(low, mask, 1.0)
    torch.testing.assert_close(masked[0, 0, 0], torch.tensor([-1.0, 0, -2]).double().softmax(-1))
    assert masked[0, 0, 1].count_nonzero() == 0  # the score of what is hidden is the highest
    generic = generic_scaled_masked_softmax_cuda.forward(low, mask, 1.0)
    torch.testing.assert_close(generic, masked)
    none = torch.zeros_like(mask)
    lower = low.clamp(max=-10000.5)
    assert scaled_masked_softmax_cuda.forward(lower, none, 1.0).sum().item() == pytest.approx(2)
    assert generic_scaled_masked_softmax_cuda.forward(lower, none, 1.0).count_nonzero() == 0
    with pytest.raises(TypeError, match=r"bool or uint8, not torch\.float64"):
        scaled_masked_softmax_cuda.forward(low, none.double(), 1.0)


@pytest.mark.parametrize(
    ("keys", "rows"), [(1, 256), (2, 128), (3, 64), (16, 16), (17, 8), (128, 8), (129, 4)]
)
def test_rows_of_a_block(keys: int, rows: int) -> None:
    assert scaled_masked_softmax_cuda.get_batch_per_block(5, keys, 2, 3) == rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_in_place(dtype: torch.dtype) -> None:
    scores, values = rand(2, 3, 4, 5).to(dtype), rand(2, 3, 5, 6).to(dtype)
    inner = scores.double().requires_grad_()
    expected = inner.softmax(-1)
    given = scores.clone()
    assert attn_core_inplace_cuda.forward_(given, 24, 5) is None
    within = torch.finfo(dtype).eps
    torch.testing.assert_close(given.double(), expected, rtol=within, atol=within)
    cotangent = rand(2, 3, 4, 6).to(dtype)
    (right,) = torch.autograd.grad(expected @ values.double(), inner, cotangent.double())
    assert attn_core_inplace_cuda.backward_(given, cotangent, values, 24, 5, 6) is None
    torch.testing.assert_close(given.double(), right, rtol=8 * within, atol=8 * within)


CODE = """
import importlib
import torch
from torch import nn

core = importlib.import_module("attn_core_inplace_cuda")


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, scale):
        import scaled_masked_softmax_cuda

        scale_t = torch.tensor([scale])
        out = scaled_masked_softmax_cuda.forward(x, mask, scale_t[0])
        ctx.save_for_backward(out, scale_t)
        return out

    @staticmethod
    def backward(ctx, dout):
        import scaled_masked_softmax_cuda

        out, scale_t = ctx.saved_tensors
        return scaled_masked_softmax_cuda.backward(dout, out, scale_t[0]), None, None


class Core(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scores = q @ k.mT
        core.forward_(scores, scores[..., 0].numel(), scores.shape[-1])
        ctx.save_for_backward(q, k, v, scores)
        return scores @ v

    @staticmethod
    def backward(ctx, dout):
        q, k, v, scores = ctx.saved_tensors
        dv = scores.mT @ dout
        core.backward_(scores, dout, v, scores[..., 0].numel(), scores.shape[-1], v.shape[-1])
        return scores @ k, scores.mT @ q, dv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 18)
        self.second = nn.Linear(6, 18)

    def heads(self, x):
        return x.unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)

    def forward(self, x, mask):
        q, k, v = self.heads(self.first(x))
        weights = Masked.apply(q @ k.mT, mask[:, None, None, :].expand(-1, 1, x.shape[1], -1), 0.5)
        x = (weights @ v).transpose(1, 2).flatten(2)
        q, k, v = self.heads(self.second(x))
        return Core.apply(q, k.contiguous(), v.contiguous()).transpose(1, 2).flatten(2)
"""


def test_models_with_such_attention_are_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {"first": torch.nn.Linear(6, 18), "second": torch.nn.Linear(6, 18)}
    checkpoint, model = saved_with(CODE, **parts)
    _, report = verified(
        tmp_path / "b",
        (checkpoint, model),
        ["x:[batch,length,6]", "mask:bool[batch,length]"],
        ["attn_core_inplace_cuda", "scaled_masked_softmax_cuda"],
    )
    rows = [row for row in report.results if row.verdict == "pass"]
    assert {"run", "own backward"} <= {row.way for row in rows}
