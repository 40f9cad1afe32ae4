"""Packed sequences of flash-linear-attention, and what its layers make of an attention mask."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import api, shims
from fuseport.tests.test_fla import G, H, K, L, V, agree, ops, rand, unit
from fuseport.tests.test_fla_models import saved

with shims.installed():
    from fla.modules import convolution
    from fla.ops import gated_delta_product, gated_delta_rule, hgrn, kda

STARTS = [0, 4, 5, L]
PARTS = [slice(a, b) for a, b in pairwise(STARTS)]
ENDS = torch.tensor(STARTS)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(function: Callable[..., Any], times: int = 1, **given: Tensor) -> None:
    """Values and gradients are those of the sequences run apart; q, k, v, … have time second.

    What has `times` as many steps as there are is counted so.
    """

    def apart(**given: Tensor) -> Tensor:
        results = []
        for part in PARTS:
            wider = slice(part.start * times, part.stop * times)
            now = {n: t[:, wider if t.shape[1] == L * times else part] for n, t in given.items()}
            results.append(function(**now)[0])
        return torch.cat(results, 1)

    agree(lambda **given: function(**given, cu_seqlens=ENDS)[0], apart, **given)


def mixed() -> dict[str, Tensor]:
    return {"q": rand(1, L, H, K), "k": unit(1, L, H, K), "v": rand(1, L, H, V)}


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "delta_rule", "kda"])
def test_delta_rules(way: str, rule: str) -> None:
    owner = {"gated_delta_rule": gated_delta_rule, "delta_rule": ops, "kda": kda}[rule]
    function = getattr(owner, f"{way}_{rule}")
    given = mixed() | {"beta": rand(1, L, H)}
    if rule != "delta_rule":
        given["g"] = rand(*(1, L, H, K)[: 4 if rule == "kda" else 3])
    if rule == "gated_delta_rule":
        given |= {"q": rand(1, L, G, K), "k": unit(1, L, G, K)}

    def called(beta: Tensor, g: Tensor | None = None, **given: Any) -> Any:
        decay = {} if g is None else {"g": F.logsigmoid(g)}
        return function(**given, **decay, beta=beta.sigmoid())

    check(called, **given)


@pytest.mark.parametrize("gated", [True, False])
def test_several_keys_at_each_step(gated: bool) -> None:
    def called(g: Tensor | None = None, **given: Any) -> Any:
        decay = None if g is None else F.logsigmoid(g)
        return gated_delta_product.chunk_gated_delta_product(**given, g=decay, num_householder=3)

    n = 3 * L
    given = {"q": rand(1, L, H, K), "k": unit(1, n, H, K), "v": rand(1, n, H, V)}
    given |= {"beta": rand(1, n, H)} | ({"g": rand(1, L, H)} if gated else {})
    check(called, 3, **given)


@pytest.mark.parametrize("name", ["chunk_gla", "fused_recurrent_gla", "chunk_simple_gla"])
def test_states_that_decay(name: str) -> None:
    function = getattr(ops, name)
    decay = "gk" if name == "fused_recurrent_gla" else "g"

    def called(g: Tensor, **given: Any) -> Any:
        return function(**given, **{decay: F.logsigmoid(g)})

    check(called, **mixed(), g=rand(*(1, L, H, K)[: 3 if "simple" in name else 4]))


def test_retention_and_convolution() -> None:
    check(ops.chunk_retention, **mixed())
    weight = rand(H, 3)
    check(lambda x, **ends: convolution.causal_conv1d(x, weight, **ends), x=rand(1, L, H))


def test_hgrn() -> None:
    def called(g: Tensor, **given: Any) -> Any:
        return hgrn.fused_recurrent_hgrn(**given, g=F.logsigmoid(g))

    check(called, x=rand(1, L, K), g=rand(1, L, K))


def test_states_of_packed_sequences_are_refused() -> None:
    x = torch.randn(1, 4, 2, 8)
    ends = {"cu_seqlens": torch.tensor([0, 4])}
    for function in (kda.chunk_kda, gated_delta_rule.chunk_gated_delta_rule):
        decay = x if function is kda.chunk_kda else x[..., 0]
        for states in ({"output_final_state": True}, {"initial_state": torch.zeros(1, 2, 8, 8)}):
            with pytest.raises(NotImplementedError, match="with cu_seqlens, and states"):
                function(x, x, x, decay, x[..., 0], **ends, **states)


@pytest.mark.parametrize("kind", ["gated_deltanet", "gla", "kda"])
def test_a_model_with_an_attention_mask_verifies(kind: str, tmp_path: Path) -> None:
    """Its layers take the steps that count out of their rows, and pack them."""
    saved(kind, tmp_path / "saved")
    shapes = "input_ids:int64[batch,length]<30,attention_mask:int64[batch,length]<2"
    api.export(tmp_path / "saved", tmp_path / "b", format="onnx", inputs=shapes)
    report = api.verify(tmp_path / "b", runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()


NONE = """
import torch
from torch import nn
from fla.ops import simple_gla, kda

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x, mask):
        kept = mask > 0
        ends = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        q, k, v = (t.unflatten(-1, (2, 4))[None] for t in self.inner(x[kept]).chunk(3, -1))
        g = -v[..., 0].abs()
        of_channels = -v.abs()
        beta = torch.sigmoid(q[..., 0])
        first, _ = simple_gla.chunk_simple_gla(q, k, v, g, cu_seqlens=ends)
        second, _ = kda.chunk_kda(q, k, v, of_channels, beta, cu_seqlens=ends)
        return first.sum((0, 1)), second.sum((0, 1))
"""


def test_no_step_at_all_is_kept(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """ONNX Runtime's Scan refuses to go over none."""
    checkpoint, model = saved_with(NONE, inner=torch.nn.Linear(8, 24))
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=["x:[batch,l,8]", "mask:int64[batch,l]<2"],
        format="onnx",
    )
    for kind in ("forward", "gradient"):
        session = onnxruntime.InferenceSession(bundle.folder / f"{kind}.onnx")
        for kept in (1, 0):
            feed = {"x": torch.randn(2, 3, 8).numpy(), "mask": torch.full((2, 3), kept).numpy()}
            for more in session.get_inputs()[2:]:
                feed[more.name] = torch.ones(2, 4).numpy()
            results = session.run(None, feed)
            assert {bool(result.any()) for result in results} == {bool(kept)}
