"""torch's `flex_attention`, which no format takes, and code that compiles it or other functions."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch._dynamo.utils import counters

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code import flex_attention

BATCH, HEADS, QUERIES, KEYS = 2, 4, 5, 7
TORCHS = theirs.flex_attention, theirs.create_block_mask
BIAS, TABLE, SLOPES = torch.randn(HEADS, QUERIES, KEYS), torch.randn(HEADS, 20), torch.rand(HEADS)
SCORES: dict[str, Any] = {
    "plain": None,
    "slopes": lambda score, b, h, i, j: score + SLOPES[h] * (j - i),
    "bias": lambda score, b, h, i, j: score + BIAS[h, i, j],
    "one after another": lambda score, b, h, i, j: score + BIAS[h][i][j],
    "relative": lambda score, b, h, i, j: 5 * torch.tanh(score / 5) + TABLE[h, j - i + 10],
    "masked": lambda score, b, h, i, j: torch.where(i >= j, score * TABLE[0, h], -float("inf")),
}
MASKS: dict[str, Any] = {
    "all": None,
    "causal": lambda b, h, i, j: i >= j,
    "of a sample": lambda b, h, i, j: (j < 3 + b) & (h >= 0),
    "rows of nothing": lambda b, h, i, j: (i > 1) & (i - j < 2),
}


@pytest.fixture(autouse=True)
def _torchs_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flex_attention", "create_block_mask"):
        monkeypatch.setattr(theirs, name, getattr(theirs, name))
    flex_attention.allow()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_it_is_torchs(score: str, mask: str) -> None:
    query = torch.randn(BATCH, HEADS, QUERIES, 8)
    key, value = torch.randn(BATCH, HEADS, KEYS, 8), torch.randn(BATCH, HEADS, KEYS, 6)

    def run(attention: Any, masked: Any) -> Any:
        mod = MASKS[mask]
        sizes = (BATCH, HEADS, QUERIES, KEYS)
        made = None if mod is None else masked(mod, *sizes, device="cpu")
        return attention(query, key, value, SCORES[score], made, return_lse=True)

    found = run(theirs.flex_attention, theirs.create_block_mask)
    torch.testing.assert_close(found, run(*TORCHS), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_heads_that_share_keys_a_scale_and_a_mask_of_torchs() -> None:
    query, key = torch.randn(BATCH, HEADS, 6, 8), torch.randn(BATCH, 2, 6, 8)
    value, mask = torch.randn(BATCH, 2, 6, 8), TORCHS[1](MASKS["causal"], None, None, 6, 6, "cpu")
    options: dict[str, Any] = {"block_mask": mask, "scale": 0.3, "enable_gqa": True}
    found = theirs.flex_attention(query, key, value, **options)
    torch.testing.assert_close(found, TORCHS[0](query, key, value, **options))
    with pytest.raises(ValueError, match="4 heads of queries and 2 of keys want enable_gqa"):
        theirs.flex_attention(query, key, value)
    with pytest.raises(ValueError, match=r"the mask is of \(6, 6\) queries and keys"):
        theirs.flex_attention(query[:, :, :5], key, value, **options)


def test_gradients_are_those_of_its_formula() -> None:
    given = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
        def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.tanh(score) + bias[h, j]

        mask = theirs.create_block_mask(lambda b, h, i, j: i > j, 1, 1, 4, 4, device="cpu")
        return theirs.flex_attention(query, key, value, score, mask, return_lse=False)

    assert torch.autograd.gradcheck(run, (*given, bias))  # the first row has no key at all


CODE = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

flex_attention = torch.compile(flex_attention)

@torch.compile
def squashed(x):
    return torch.tanh(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.squash = torch.compile(torch.nn.functional.silu)

    @torch.compile
    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        def score(score, b, h, i, j):
            return 2 * squashed(score / 2) - self.slopes[h] * (i - j)

        n = x.shape[1]
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < 6), None, None, n, n, device=x.device
        )
        y = flex_attention(*self.split(x), score_mod=score, block_mask=mask)
        return self.squash(y.transpose(1, 2).flatten(2))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code above, imported before fuseport knows of it, as a training script has it."""
    monkeypatch.setattr(theirs, "flex_attention", TORCHS[0])
    monkeypatch.setattr(theirs, "create_block_mask", TORCHS[1])
    file = tmp_path / "attending.py"
    file.write_text(CODE)
    spec = importlib.util.spec_from_file_location("attending", file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "attending", found)
    spec.loader.exec_module(found)
    return found


def test_a_model_with_it_is_exported_and_verified(
    saved_with: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    checkpoint, code = saved_with(CODE, qkv=torch.nn.Linear(8, 24))
    torch.save({**torch.load(checkpoint), "slopes": torch.tensor([0.3, 0.2])}, checkpoint)
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=parse_inputs(["x:[batch,length,8]"])
    )
    runtimes = ["eager", "exported_program", "torchscript", "onnxruntime"]
    report = api.verify(bundle.folder, model=code, runtime=runtimes)
    assert report.exit_code(strict=True) == 0, report.failures()
    assert "grad/slopes" in {row.tensor for row in report.results if row.runtime == "onnxruntime"}


def test_code_that_was_imported_before_is_left_as_it_was(
    module: ModuleType, tmp_path: Path
) -> None:
    """It computes by ours and uncompiled where fuseport calls it, and is compiled afterwards."""
    frames = dict(counters["frames"])
    before, method = dict(vars(module)), vars(module.Net)["split"]
    torch.save(module.Net().state_dict(), tmp_path / "net.pt")
    bundle = api.export(
        tmp_path / "net.pt", tmp_path / "b", model=module.Net, format="onnx",
        given={"x": torch.randn(2, 7, 8)},
    )  # fmt: skip
    report = api.verify(bundle.folder, model=module.Net, runtime="onnxruntime")
    assert report.exit_code() == 0, report.failures()
    assert dict(counters["frames"]) == frames  # none was compiled
    assert {name: vars(module)[name] for name in before} == before
    assert vars(module.Net)["split"] is method
