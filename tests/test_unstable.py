"""What two runs of a model give otherwise is compared with nothing, at any case."""

import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify import baseline, truth
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.rows import judged, repeated
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import read_all
from fuseport.exporter.verify.tolerances import Tolerances

CASE = Case("export", {"batch": 2, "length": 5}, "contiguous", 0)


class Net(nn.Module):
    """Calls `function` on its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def model_of(function: Callable[[Tensor], Any]) -> Model:
    spec = TensorSpec("x", "float32", ("batch", "length", 4))
    return Model(Net(function).eval(), "user", {}, (spec,), CASE.sizes)


def test_what_does_not_repeat_itself_is_unstable(tmp_path: Path) -> None:
    def noisy(x: Tensor) -> dict[str, Tensor]:
        return {"noise": x + 1e-3 * torch.randn(x.shape), "y": x}

    (sample,) = truth.compute(model_of(noisy), [CASE], tmp_path)
    assert sample.unstable == ("noise",)
    (tmp_path / "again").mkdir()
    again = truth.compute(model_of(noisy), [CASE], tmp_path / "again")
    verdicts = {row.tensor: row.verdict for row in repeated([sample], again)}
    assert verdicts["noise"] == "unsupported"
    assert verdicts["y"] == "pass"


def test_another_order_of_a_sum_is_no_other_result(tmp_path: Path) -> None:
    """Products on several threads take any; both orders are in the baseline."""
    calls = itertools.count()

    def rounds(x: Tensor) -> dict[str, Tensor]:
        ulp = torch.finfo(x.dtype).eps * next(calls)
        off = x.detach() * ulp
        return {"little": x + 3 * off, "more": x + 30 * off, "none": 0 * x + ulp}

    (sample,) = truth.compute(model_of(rounds), [CASE], tmp_path)
    assert sample.unstable == ("more", "none")
    assert sample.expected["little"].baseline.max_abs > 0


def test_what_is_run_twice_adds_in_one_order() -> None:
    """The gradient of `weight[indices]`, of experts for example, else adds in any order."""
    orders = []
    for way in baseline.ways(Net(lambda x: x), {"x": torch.ones(2)}):
        with way:
            orders.append(torch.are_deterministic_algorithms_enabled())
    assert orders[:3] == [True, True, False]
    assert not any(orders[2:])
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_unstable_at_one_case_is_at_each(tmp_path: Path) -> None:
    """Two runs that draw few numbers are alike now and then; the artifact's is another then."""

    def noisy(x: Tensor) -> dict[str, Tensor]:
        noise = torch.randn(x.shape) if len(x) > 1 else torch.zeros(x.shape)
        return {"noise": x + noise, "y": x}

    one = Case("one", {"batch": 1, "length": 5}, "contiguous", 1)
    samples = truth.compute(model_of(noisy), [one, CASE], tmp_path)
    assert [sample.unstable for sample in samples] == [("noise",), ("noise",)]
    assert read_all(tmp_path) == samples


def test_of_what_float32_has_nothing_of_nothing_is_said(tmp_path: Path) -> None:
    """Zeros would be within the bound, which the user may give another one in place of."""

    def cancels(x: Tensor) -> dict[str, Tensor]:
        return {"lost": (x + 1e9) - 1e9, "kept": x * 2}

    (sample,) = truth.compute(model_of(cancels), [CASE], tmp_path)
    x = load_file(sample.file)["input/x"]
    outputs = [TensorSpec(name, "float32", ("batch", "length", 4)) for name in ("lost", "kept")]
    described = [asdict(spec) for spec in outputs]
    program = {"inputs": [], "outputs": described, "device": "cpu", "none": []}
    for lost in (x, torch.zeros_like(x)):
        answer = tmp_path / "answer.safetensors"
        save_file({"lost": lost, "kept": x * 2}, answer)
        job = Job("onnxruntime", Path("forward.onnx"), "forward", "run", "export")
        rows = judged(Answer(job, "done", calls={1: answer}), sample, program, None)
        verdicts = {row.tensor: (row.verdict, row.reason) for row in rows}
        assert verdicts["kept"] == ("pass", None)
        assert verdicts["lost"][0] == "unsupported"
        assert "zeros would pass" in str(verdicts["lost"][1])
    given = Tolerances({"lost": 100.0})
    rows = judged(Answer(job, "done", calls={1: answer}), sample, program, given)
    assert {row.tensor: row.verdict for row in rows} == {"kept": "pass", "lost": "pass"}
