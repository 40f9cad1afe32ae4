"""Models made at random: a few are right, and what a writer does wrong is seen."""

from pathlib import Path

import pytest
import torch

from fuseport.exporter.formats import torchscript
from fuseport.tests.benchmarks import random_models
from fuseport.tests.benchmarks.random_drawing import WIDTH, Model, drawn


def test_a_draw_repeats_and_runs() -> None:
    models = [drawn(number) for number in range(20)]
    assert [drawn(number).text for number in range(20)] == [model.text for model in models]
    assert len({model.text for model in models}) == 20
    for model in models:
        outputs = model.module()(torch.randn(3, 5, WIDTH))
        assert any(value.requires_grad for value in outputs.values())


TEXT = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return {"y": x[:, 1:] - x[:, :-1].tanh() * self.w}
"""


@pytest.mark.parametrize("known", [True, False])
def test_what_a_writer_does_wrong_is_seen(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        table = {**torchscript._SIZE_OPERATORS, torch.ops.aten.sub.Tensor: "({0} + {1})"}
        monkeypatch.setattr(torchscript, "_SIZE_OPERATORS", table)
    word, words = random_models.tried(Model(0, TEXT), tmp_path)
    assert (word, "forward.pt y at (2, 5)" in words) == (
        ("equal", False) if known else ("wrong", True)
    )


@pytest.mark.parametrize("verify", [True, False])
def test_what_cannot_be_exported_is_refused(verify: bool, tmp_path: Path) -> None:
    text = TEXT.replace("* self.w", "* float(x.numpy(force=True).sum())")
    word, words = random_models.tried(Model(0, text), tmp_path, verify=verify)
    assert word == "refused", words
