"""A result that is beyond its bound by little is held against more computations of the model."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify import baseline, truth
from fuseport.exporter.verify.compare import Tolerance
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample, opened
from fuseport.exporter.verify.second_look import SecondLook
from fuseport.exporter.verify.tolerances import Tolerances

CASE = Case("export", {"batch": 2}, "contiguous", 0)
INPUT = TensorSpec("x", "float32", ("batch", 40))
PROGRAM = {"outputs": [asdict(TensorSpec("output", "float32", ("batch", 40)))], "device": "cpu"}


class Steep(nn.Module):
    """What moves its input by an ulp moves its output by thousands."""

    def forward(self, x: Tensor) -> Tensor:
        return (1e4 * x).sin()


@dataclass
class Setting:
    """A sample of that model, and results that are off by a multiple of what its baseline is."""

    folder: Path
    model: Model
    sample: Sample
    rebuilt: int = 0

    def rebuild(self) -> Model:
        self.rebuilt += 1
        return self.model

    def lucky(self, share: float) -> Sample:
        """The sample with a share of its baseline."""
        known = self.sample.expected["output"]
        norms = Norms(share * known.baseline.max_abs, share * known.baseline.rms)
        return replace(self.sample, expected={"output": replace(known, baseline=norms)})

    def off_by(self, factor: float) -> Answer:
        with opened(self.sample) as exact:
            error = factor * self.sample.expected["output"].baseline.rms
            found = (exact("output") + error).float()
        file = self.folder / "answer.safetensors"
        save_file({"output": found}, file)
        job = Job("onnxruntime", Path("forward.onnx"), "forward", "run", "export")
        return Answer(job, "done", calls={1: file})

    def looked(
        self, answer: Answer, sample: Sample, tolerances: Tolerances | None = None
    ) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """The rows of the first look, and of the second."""
        rows = tuple(judged(answer, sample, PROGRAM, tolerances))
        again = SecondLook(self.rebuild, lambda _: None, Spent())
        return rows, again.judged(answer, sample, PROGRAM, tolerances, rows)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    model = Model(Steep(), "user", {}, (INPUT,), CASE.sizes)
    (sample,) = truth.compute(model, [CASE], tmp_path)
    return Setting(tmp_path, model, sample)


def test_what_an_unlucky_baseline_fails_passes(setting: Setting) -> None:
    first, second = setting.looked(setting.off_by(0.5), setting.lucky(0.05))
    assert [row.verdict for row in first] == ["fail"]
    assert [row.verdict for row in second] == ["pass"]
    assert first[0].max_abs_error == second[0].max_abs_error
    assert (first[0].baseline_error or 0.0) < (second[0].baseline_error or 0.0)
    assert setting.rebuilt == 1


def test_what_is_wrong_stays_wrong(setting: Setting) -> None:
    first, second = setting.looked(setting.off_by(12.0), setting.sample)
    assert [row.verdict for row in (*first, *second)] == ["fail", "fail"]
    assert 1.0 < (second[0].share or 0.0) <= (first[0].share or 0.0) < 8.0
    assert setting.rebuilt == 1


@pytest.mark.parametrize(
    ("factor", "tolerances"),
    [
        (0.5, None),  # it passes
        (100.0, None),  # no luck makes that right
        (12.0, Tolerances.everywhere(Tolerance(atol=1e-9))),  # of which the baseline is no part
    ],
)
def test_what_is_in_no_doubt_is_not_computed_again(
    setting: Setting, factor: float, tolerances: Tolerances | None
) -> None:
    first, second = setting.looked(setting.off_by(factor), setting.sample, tolerances)
    assert first == second
    assert setting.rebuilt == 0


def test_further_ways_are_all_other_ones() -> None:
    model, x = Steep(), torch.randn(40)
    found = []
    for begin in (8, 16):
        for way in baseline.further(model, {"x": x}, begin):
            with way as inputs:
                found.append(model(inputs["x"]))
    assert len(found) == 2 * baseline.FURTHER
    exact = model(x.double())
    assert all(0 < float((one - exact).abs().max()) < 0.1 for one in found)
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": nn.functional.silu,
    "written in place": lambda x: x.clone().sigmoid_(),
    "of a transposed one": lambda x: torch.exp(x.T),
    "of several results": nn.functional.logsigmoid,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_way_has_elementary_functions_that_are_off_to_one_side(name: str) -> None:
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(300, 100)
    exact = function(x.double())
    size = torch.finfo(torch.float32).eps * exact.abs()

    def bias() -> float:
        return float(((function(x).double() - exact) * exact.sign() / size).mean())

    found = []
    for way in baseline.ways(nn.Identity(), {"x": x}):
        with way:
            found.append(bias())
            assert function(x.bfloat16()).dtype == torch.bfloat16
    assert found[4] == max(found)
    assert found[4] > found[0] + 0.12  # an ulp is between a half and one times this size
    assert abs(found[0]) < 0.05
