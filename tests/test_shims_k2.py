"""The stand-in for k2, against the formulas of its kernels, and in a model like icefall's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified

with shims.installed(shims.SHIMS):
    import k2
    import k2.ragged
    from k2.version import with_cuda

CONSTANTS = {"l": (4.0, 0.035), "r": (1.0, 0.313261687)}


def expected(x: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """Values and slopes in float64, of x that an exponential can bear."""
    shift, offset = CONSTANTS[which]
    e = torch.exp(x.double() - shift)
    return torch.log1p(e) - 0.08 * x.double() - offset, 0.92 - 1 / (1 + e)


@pytest.mark.parametrize("which", CONSTANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_and_slopes(which: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-30, 80, 397).to(dtype).view(1, 397, 1).expand(2, 397, 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    value, slope = (t.to(wide) for t in expected(x, which))
    names = (f"swoosh_{which}", f"swoosh_{which}_forward")
    for found in (getattr(k2, name)(x) for name in names):
        torch.testing.assert_close(found, value)
    both = getattr(k2, f"swoosh_{which}_forward_and_deriv")(x)
    torch.testing.assert_close(both, (value, slope))
    leaf = x.clone().requires_grad_()
    out = getattr(k2, f"swoosh_{which}")(leaf, 0.0)
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    torch.testing.assert_close(gradient, slope.to(dtype))


@pytest.mark.parametrize("which", CONSTANTS)
def test_large_numbers_stay_finite(which: str) -> None:
    x = torch.tensor([-1e4, 1e4], requires_grad=True)
    value, slope = getattr(k2, f"swoosh_{which}_forward_and_deriv")(x)
    offset = torch.tensor(CONSTANTS[which][1])
    torch.testing.assert_close(
        value.detach(), torch.stack([800 - offset, 9200 - offset]), atol=4.5, rtol=0
    )
    (gradient,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([-0.08, 0.92]))
    torch.testing.assert_close(slope.detach(), gradient)


def test_what_draws_at_random_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"dropout_prob=0.5, which draws at random"):
        k2.swoosh_r(torch.ones(3), dropout_prob=0.5)


def test_other_names_can_be_named_and_refuse_to_be_called() -> None:
    class Lattice(k2.Fsa):  # type: ignore[misc]  # the stand-in has any
        pass

    def annotated(graph: k2.Fsa | None, of: list[k2.RaggedTensor] | None) -> k2.ragged.Shape:
        return graph

    assert annotated(None, None) is None
    assert not isinstance(3, k2.RaggedTensor)
    for name, call in (
        ("k2.RaggedTensor", k2.RaggedTensor),
        ("k2.Fsa.from_dict", k2.Fsa.from_dict),
        ("k2.rnnt_loss_pruned", k2.rnnt_loss_pruned),
        ("k2.ragged.RaggedShape", k2.ragged.RaggedShape),
        ("k2.version.with_cuda", with_cuda),
        ("Lattice", Lattice),
    ):
        with pytest.raises(NotImplementedError, match=rf"{name} was called"):
            call([[1, 2]])


NET = """
from typing import Optional
import random
import k2
import torch
from torch import nn

def padded(lengths):
    return torch.arange(0, lengths.max())[None] >= lengths[:, None]

class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return k2.swoosh_l_forward(x) @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        y, slope = k2.swoosh_l_forward_and_deriv(x)
        return dy @ weight * slope, dy.flatten(0, 1).T @ y.flatten(0, 1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x, lengths, graph: Optional[k2.Fsa] = None):
        x = self.first(x)
        x = (k2.swoosh_r(x) if x.requires_grad else k2.swoosh_r_forward(x)).to(x.dtype)
        mask = padded(lengths)
        assert mask.shape == x.shape[:2], (mask.shape, x.shape)
        x = Both.apply(x, self.second.weight)
        return x.masked_fill(mask[..., None], 0.0), (lengths + 1) // 2
"""


def test_a_model_with_lengths_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """Its mask is as long as the longest sequence, which its code asks to be as long as x."""
    torch.manual_seed(0)
    parts = {"first": torch.nn.Linear(5, 8), "second": torch.nn.Linear(8, 6, bias=False)}
    saved = saved_with(NET, **parts)
    inputs = ["x:[batch,length,5]", "lengths:int64[batch]>=1<=length"]
    bundle, report = verified(tmp_path / "b", saved, inputs, ["k2"])
    assert "own backward" in {row.way for row in report.results if row.verdict == "pass"}
    (note,) = (note for note in bundle.manifest["notes"] if "decides by" in note)
    assert "artifacts fail where it comes out otherwise, as the model does: Assertion" in note
    in_torch = torch.jit.load(str(bundle.folder / "forward.pt"))
    in_onnx = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    x = torch.randn(2, 7, 5)
    in_torch(x, torch.tensor([3, 7]))
    in_onnx.run(None, {"x": x.numpy(), "lengths": np.array([3, 7])})
    # Of one step, the mask would be that of all.
    with pytest.raises(torch.jit.Error, match=r"comes to True"):
        in_torch(x, torch.tensor([1, 1]))
    with pytest.raises(Exception, match=r"comes to True"):
        in_onnx.run(None, {"x": x.numpy(), "lengths": np.array([1, 1])})
