"""What a model takes by order: where rounding decides it, all that follows differs by more."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify import truth
from fuseport.exporter.verify.choices import Choices
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample, read_all
from fuseport.exporter.verify.second_look import SecondLook

SPEC = TensorSpec("x", "float32", ("batch", 40))
CASE = Case("export", {"batch": 3}, "contiguous", 0)
PROGRAM = {
    "inputs": [asdict(SPEC)],
    "outputs": [
        asdict(TensorSpec("values", "float32", ("batch", 4))),
        asdict(TensorSpec("places", "int64", ("batch", 4))),
    ],
    "device": "cpu",
    "none": [],
}

Results = dict[str, Tensor]


class Best(nn.Module):
    """Takes four of 40 values by a score, as a detector takes queries."""

    def __init__(self, scores: Callable[["Best", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.rand(40) + 1)
        self.scores = scores
        self.register_buffer("less", torch.zeros(40))

    def forward(self, x: Tensor) -> Results:
        places = self.scores(self, x).topk(4).indices
        return {"values": (x * self.w).sin().gather(1, places), "places": places}


def plain(net: Best, x: Tensor) -> Tensor:
    return x * net.w - net.less


def tied(net: Best, x: Tensor) -> Tensor:
    """Equal but for the order in which each sums up."""
    return torch.stack([(x * net.w).roll(n, 1).sum(1) for n in range(40)], 1)


def model_of(net: Best) -> Model:
    return Model(net.eval(), "user", {}, (SPEC,), CASE.sizes)


def nearly_tied(folder: Path) -> tuple[Model, Sample]:
    """The second and the third of the second row are a rounding apart."""
    net = Best(plain)
    for name in ("first", "second"):
        (folder / name).mkdir()
    (first,) = truth.compute(model_of(net), [CASE], folder / "first")
    x = load_file(first.file)["input/x"]
    scores = (x * net.w)[1].detach()
    _, second, third, _ = scores.topk(4).indices.tolist()
    net.less[second] = scores[second] - scores[third] - 5e-7
    model, given = model_of(net), {"export": first.file}
    (sample,) = truth.compute(model, [CASE], folder / "second", given=given)
    return model, sample


def results(model: Model, sample: Sample, *, swapped: bool) -> Results:
    """Of a runtime, which may round the second below the third."""
    stored = load_file(sample.file)
    x = stored["input/x"].requires_grad_()
    with torch.enable_grad():
        places = model.module(x)["places"]
        if swapped:
            places[1] = places[1, [0, 2, 1, 3]]
        values = (x * model.module.w).sin().gather(1, places)
        of_x, of_w = torch.autograd.grad(values, [x, model.module.w], stored["cotangent/values"])
    return {"values": values.detach(), "places": places, "grad/x": of_x, "grad/w": of_w}


def looked(
    model: Model, sample: Sample, found: Results, folder: Path, program: str
) -> tuple[list[str], SecondLook]:
    """The tensors that are wrong, at a second look."""
    if program == "forward":
        found = {name: t for name, t in found.items() if not name.startswith("grad/")}
    file = folder / "answer.safetensors"
    save_file(found, file)
    job = Job("onnxruntime", Path(f"{program}.onnx"), program, "run", "export")
    answer = Answer(job, "done", calls={1: file})
    rows = tuple(judged(answer, sample, PROGRAM, None))
    again = SecondLook(lambda: model, lambda _: None, Spent())
    rows = again.judged(answer, sample, PROGRAM, None, rows)
    assert [row.tensor for row in rows] == list(found)
    return [row.tensor for row in rows if row.verdict != "pass"], again


def test_integers_of_numbers_are_choices() -> None:
    x = torch.tensor([2.0, 1.0, 3.0])
    with Choices() as choices:
        x.topk(2), x.argmax(), torch.sort(x), x.long(), x.max(0)
        x > 1, x + 1, torch.arange(3) + 1, x.view(torch.int32)  # none
        F.max_pool1d(x[None], 2, return_indices=True), torch.empty_like(x, dtype=torch.int64)
    assert [name for name, _ in choices.made] == ["topk", "argmax", "sort", "long", "max"]


def test_choices_differ_by_what_was_chosen() -> None:
    runs = []
    for x in ([2.0, 1.0, 3.0], [2.5, 1.0, 3.5], [2.0, 1.0, 0.0]):
        with Choices() as choices:
            torch.tensor(x).topk(2), torch.tensor(x).argmin()
        runs.append(choices)
    first, moved, other = runs
    assert first.otherwise(moved) == []
    assert first.digest() == moved.digest()
    assert first.otherwise(other) == ["topk", "argmin"]
    assert first.digest() != other.digest()
    with Choices() as none:
        torch.ones(3).exp()
    assert none.digest() == ""
    assert first.otherwise(none) == []


def test_a_computation_that_chooses_otherwise_is_no_baseline(tmp_path: Path) -> None:
    """Else anything passes that is off by no more than one choice is from another."""
    model, sample = nearly_tied(tmp_path)
    assert sample.undecided == ()
    assert sample.expected["places"].baseline.max_abs == 0.0
    assert sample.expected["values"].baseline.max_abs < 1e-5
    more = truth.further(model, sample, 0)
    assert more.expected["values"].baseline.max_abs < 1e-5
    every = truth.further(model, replace(sample, undecided=("topk",)), 0)
    assert every.expected["values"].baseline.max_abs > 1e-2


@pytest.mark.parametrize("program", ["forward", "gradient"])
def test_another_choice_is_right_where_a_rounding_decides(program: str, tmp_path: Path) -> None:
    model, sample = nearly_tied(tmp_path)
    wrong, again = looked(model, sample, results(model, sample, swapped=False), tmp_path, program)
    assert (wrong, again.notes()) == ([], ())
    wrong, again = looked(model, sample, results(model, sample, swapped=True), tmp_path, program)
    assert wrong == []
    (note,) = again.notes()
    assert "of the next in an order" in note


@pytest.mark.parametrize("program", ["forward", "gradient"])
@pytest.mark.parametrize("swapped", [False, True])
def test_what_no_choice_explains_is_wrong(swapped: bool, program: str, tmp_path: Path) -> None:
    model, sample = nearly_tied(tmp_path)
    found = results(model, sample, swapped=swapped)
    found["values"][0, 1] += 1e-3
    wrong, again = looked(model, sample, found, tmp_path, program)
    assert "values" in wrong
    assert again.notes() == ()


def test_another_choice_is_wrong_where_no_rounding_decides(tmp_path: Path) -> None:
    model = model_of(Best(plain))
    (sample,) = truth.compute(model, [CASE], tmp_path)
    found = results(model, sample, swapped=True)
    wrong, again = looked(model, sample, found, tmp_path, "gradient")
    assert {"values", "places"} <= set(wrong)
    assert again.notes() == ()


def test_of_what_rounding_decides_nothing_is_said(tmp_path: Path) -> None:
    model = model_of(Best(tied))
    (sample,) = truth.compute(model, [CASE], tmp_path)
    assert sample.undecided == ("topk",)
    assert read_all(tmp_path) == (sample,)
    file = tmp_path / "answer.safetensors"
    save_file(results(model, sample, swapped=False), file)
    job = Job("onnxruntime", Path("gradient.onnx"), "gradient", "run", "export")
    rows = list(judged(Answer(job, "done", calls={1: file}), sample, PROGRAM, None))
    verdicts = {row.tensor: row.verdict for row in rows}
    assert verdicts["values"] == verdicts["grad/x"] == verdicts["grad/w"] == "unsupported"
    reason = next(row.reason for row in rows if row.tensor == "values")
    assert reason is not None
    assert "in float32 rounding decides what topk gives" in reason
    (note,) = truth.doubts([sample])
    assert note.startswith("export: rounding decides what topk gives")
