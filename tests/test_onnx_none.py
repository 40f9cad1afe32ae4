"""What is computed of none: a mask selects nothing, or an input is too short for a rest."""

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fuseport.exporter import api
from fuseport.exporter.formats._onnx import decompositions, none
from fuseport.exporter.program.sizes.bounds import may_be_none

CODE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.depthwise = nn.Conv1d(6, 6, 3, padding=1, groups=6)
        self.pointwise = nn.Conv1d(6, 8, 1)

    def forward(self, x, mask):
        every = self.inner(x).flatten(0, 1)
        rows = every[mask.flatten() > 0]
        q, k = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in (every, rows))
        return FORMULA
"""
INPUTS = ["x:[batch,length,8]", "mask:int64[batch,length]<2"]
# Of q (2, batch · length, 4), k (2, selected, 4), rows (selected, 8), x and the mask.
FORMULAS = {
    "products": "torch.sigmoid(q @ k.transpose(-1, -2)) @ k, torch.bmm(k, q.transpose(1, 2))",
    "baddbmm": "torch.baddbmm(q, (q @ k.transpose(1, 2)).relu(), k, beta=0.5, alpha=2.0), every",
    "einsum": "torch.einsum('hqd,hkd->hqk', q, k), torch.einsum('hqd,hkd,hkc->hqc', q, k, k)",
    "attention": "F.scaled_dot_product_attention(q[None], k[None], k[None]), every.mean()",
    "attention of none": "F.scaled_dot_product_attention(k[None], q[None], value=q[None]), every",
    "attention to a rest": "F.scaled_dot_product_attention(*(t.unflatten(-1, (2, 4))"
    ".transpose(1, 2) for t in (self.inner(x), x[:, 1:], x[:, :-1]))), every",
    "means": "rows.mean(0), rows.mean(), rows.mean((0, 1), keepdim=True), k.mean(1)",
    "means of one number": "rows.mean().mean(-1, keepdim=True), x.sum().mean(0) * every, "
    "rows.sum().mean((0,), dtype=torch.float64).float(), x[:, 1:].sum().mean(-1)",
    "convolutions": "self.pointwise(self.depthwise(self.conv("
    "self.inner(x[mask[:, 0] > 0]).transpose(1, 2)))).sum(0), every",
    "layers of sequences": "self.inner(x[mask[:, 0] > 0].mT.cumsum(-1).mT), every",
    "repeats": "k.repeat_interleave(2, 0), k.repeat_interleave(3, -1), rows.repeat_interleave(2), "
    "x[:, 1:].repeat_interleave(2, 0)",
    "repeats by values": "rows.repeat_interleave((rows[:, 0] > 0).long() + 1, 0), every",
    "places": "every.masked_scatter((mask.flatten() > 0)[:, None].expand(every.shape), rows), "
    "F.unfold(rows.unflatten(1, (1, 2, 4)), 2)",
    "axes from the back": "x[:, 1:].amax(-1), x[:, 1:].max(-1).values, x[:, 1:].amin(-1, True), "
    "rows.sum(-1), (x[:, 1:] > 0).any(-1).float() * rows.sum(), k.sum(-1), rows.norm(dim=-1), "
    "k.argmax(-1).float() * rows.sum()",
    "squares": "F.mse_loss(rows, 2 * rows), rows.var(0, correction=0), k.var((0, 1)), "
    "x[:, 1:].var(1), x[:, 1:].var(-1)",
    "grouped attention": "F.scaled_dot_product_attention(k.repeat(2, 1, 1)[None], "
    "*(k[None].repeat_interleave(2, 1) for _ in 'kv')), every",
    "gates": "F.logsigmoid(rows), F.logsigmoid(3 * (rows - rows.detach())), every",
    "sums so far": "rows.cumsum(0), rows.cumsum(-1), x[:, 1:].cumsum(1), rows[:, :3].cumsum(0)",
    "products of all": "rows.prod(0), rows[:, 0].prod(), x[:, 1:].prod(1), rows.relu().prod(-1)",
    "deviations": "rows.std(0), k.std((0, 1)), x[:, 1:].std(1, correction=0), rows.std(-1)",
    "logarithms of sums": "rows.logsumexp(1), torch.logsumexp(k, (0, 1)), rows.roll(1, 0), "
    "k.roll((2, 1), (1, 2)), rows.roll(3)",
    "distances": "torch.cdist(rows, every), torch.cdist(rows, 2 * rows, 1.0), "
    "F.bilinear(rows, rows, self.inner.weight.expand(2, 8, 8))",
    "losses": "F.cross_entropy(rows, (rows > 0).sum(1).clamp(max=7)), "
    "F.nll_loss(rows, (rows > 0).sum(1).clamp(max=7), reduction='sum')",
    "a loss of a rest": "F.cross_entropy(x[:, :-1].reshape(-1, 8), mask[:, 1:].reshape(-1)), every",
    "losses of rests": "F.cross_entropy(x[:, 1:].flatten(0, 1), mask[:, 1:].flatten(), "
    "label_smoothing=0.1), F.cross_entropy(x[:, 1:].mT, mask[:, 1:], ignore_index=0), "
    "F.nll_loss(self.inner(x)[:, 1:].mT, mask[:, 1:], reduction='none')",
    "halves": "F.avg_pool1d(x[:, x.shape[1] // 2 :].mT, 2, ceil_mode=True), "
    "x[:, (x.shape[1] - 1) // 2 :] @ self.inner(x[:, x.shape[1] // 2 :]).mT",
    "a rest": "x[:, 1:].transpose(1, 2) @ self.inner(x[:, :-1]), rows.sum(0)",
}


# What is left in memory is of the run before.
RUNS = ((1, 3), (0, 3), (1, 1), (0, 1), (1, 3), (0, 3))


@pytest.mark.parametrize("formula", FORMULAS)
def test_it_is_what_torch_gives(
    formula: str, tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    module, checkpoint, name = saved_net(CODE.replace("FORMULA", FORMULAS[formula]))
    bundle = api.export(checkpoint, tmp_path / "b", model=name, inputs=INPUTS, format="onnx")
    forward, gradient = (
        onnxruntime.InferenceSession(bundle.folder / f"{kind}.onnx")
        for kind in ("forward", "gradient")
    )
    for kept, length in RUNS:
        x = torch.randn(2, length, 8, requires_grad=True)
        mask = torch.full((2, length), kept)
        y = module(x, mask)
        into = dict(x=x, **dict(module.named_parameters()))
        cotangents = [torch.randn_like(part) for part in y]
        gradients = torch.autograd.grad(
            y, tuple(into.values()), cotangents, allow_unused=True, materialize_grads=True
        )
        given = {"x": x.detach().numpy(), "mask": mask.numpy()}
        starts = [i.name for i in gradient.get_inputs() if i.name not in given]
        more = {n: c.numpy() for n, c in zip(starts, cotangents, strict=True)}
        wanted = dict(zip((f"grad/{n}" for n in into), gradients, strict=True))
        for session, feed in ((forward, given), (gradient, given | more)):
            names = [output.name for output in session.get_outputs()]
            found = dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True))
            for part, result in zip(y, [found.pop(n) for n in names[: len(y)]], strict=True):
                torch.testing.assert_close(result, part, equal_nan=True)
            for key, result in found.items():
                torch.testing.assert_close(
                    result, wanted[key], equal_nan=True, atol=1e-4, rtol=1e-4
                )


@pytest.mark.parametrize(
    ("formula", "case"),
    [
        ("a rest", "batch 2, all else 1"),
        ("repeats", "masks of zeros"),
    ],
)
def test_verification_sees_it(
    formula: str,
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved_net: Callable[[str], tuple[nn.Module, Path, str]],
) -> None:
    """Where ONNX has the forms that torch gives it."""
    monkeypatch.setattr(none, "_OF_NONE", {})
    monkeypatch.delitem(decompositions._OWN, torch.ops.aten.repeat_interleave.self_int)
    _, checkpoint, name = saved_net(CODE.replace("FORMULA", FORMULAS[formula]))
    api.export(checkpoint, tmp_path / "b", model=name, inputs=INPUTS, format="onnx")
    report = api.verify(tmp_path / "b", model=name, runtime=["onnxruntime"])
    assert case in {row.case for row in report.results if row.verdict in ("fail", "error")}


def test_what_may_be_none() -> None:
    """Sizes of inputs are one or more; those by values, and what is left of one, may be 0."""
    env = ShapeEnv()
    by_values = env.create_unbacked_symint()
    assert may_be_none(by_values)
    assert may_be_none(by_values + 3) is False
    assert may_be_none(0)
    assert not may_be_none(1)
