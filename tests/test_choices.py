"""What a model takes by order: where rounding decides it, all that follows differs by more."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify import truth
from fuseport.exporter.verify.choices import Choices, FirstOfEqual
from fuseport.exporter.verify.compare import Expected, Tolerance
from fuseport.exporter.verify.doubts import doubts
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.rows import judged, repeated
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample, opened, read_all
from fuseport.exporter.verify.second_look import SecondLook
from fuseport.exporter.verify.tolerances import Tolerances
from fuseport.ops.ms_deform_attn import ms_deform_attn

SPEC = TensorSpec("x", "float32", ("batch", 40))
CASE = Case("export", {"batch": 3}, "contiguous", 0)
PROGRAM: dict[str, Any] = {
    "inputs": [asdict(SPEC)],
    "outputs": [
        asdict(TensorSpec("values", "float32", ("batch", 4))),
        asdict(TensorSpec("places", "int64", ("batch", 4))),
    ],
    "device": "cpu",
    "none": [],
}

Results = dict[str, Tensor]


TAKES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "topk": (lambda scores: scores.topk(4).indices, 4),
    "argsort": (lambda scores: scores.argsort(-1, descending=True)[:, :4], 4),
    "argmax": (lambda scores: scores.argmax(-1, True), 1),
    "argmin": (lambda scores: (-scores).argmin(-1, True), 1),
}


class Best(nn.Module):
    """Takes the first of 40 values by a score, as a detector takes queries."""

    def __init__(self, scores: Callable[["Best", Tensor], Tensor], take: str = "topk") -> None:
        super().__init__()
        self.take, self.count = TAKES[take]
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.rand(40) + 1)
        self.scores = scores
        self.register_buffer("less", torch.zeros(40))

    def forward(self, x: Tensor) -> Results:
        places = self.take(self.scores(self, x))
        return {"values": (x * self.w).sin().gather(1, places), "places": places}


def plain(net: Best, x: Tensor) -> Tensor:
    return x * net.w - net.less


def tied(net: Best, x: Tensor) -> Tensor:
    """Equal but for the order in which each sums up."""
    return torch.stack([(x * net.w).roll(n, 1).sum(1) for n in range(40)], 1)


def model_of(net: Best) -> Model:
    return Model(net.eval(), "user", {}, (SPEC,), CASE.sizes)


def nearly_tied(folder: Path, take: str = "topk") -> tuple[Model, Sample]:
    """The first and the second of the second row are a rounding apart."""
    net = Best(plain, take)
    for name in ("first", "second"):
        (folder / name).mkdir()
    (first,) = truth.compute(model_of(net), [CASE], folder / "first")
    x = load_file(first.file)["input/x"]
    scores = (x * net.w)[1].detach()
    first_of_all, second = scores.topk(2).indices.tolist()
    net.less[first_of_all] = scores[first_of_all] - scores[second] - 7e-7
    model, given = model_of(net), {"export": first.file}
    (sample,) = truth.compute(model, [CASE], folder / "second", given=given)
    return model, sample


def results(model: Model, sample: Sample, *, swapped: bool) -> Results:
    """Of a runtime, which may round the first below the second."""
    stored = load_file(sample.file)
    x = stored["input/x"].requires_grad_()
    with torch.enable_grad():
        places = model.module.scores(model.module, x).topk(4).indices
        if swapped:
            places[1] = places[1, [1, 0, 2, 3]]
        places = places[:, : model.module.count].contiguous()
        values = (x * model.module.w).sin().gather(1, places)
        of_x, of_w = torch.autograd.grad(values, [x, model.module.w], stored["cotangent/values"])
    return {"values": values.detach(), "places": places, "grad/x": of_x, "grad/w": of_w}


def looked(
    model: Model,
    sample: Sample,
    found: Results,
    folder: Path,
    program: str,
    outputs: Any = PROGRAM["outputs"],
) -> tuple[list[str], SecondLook]:
    """The tensors that are wrong, at a second look."""
    if program == "forward":
        found = {name: t for name, t in found.items() if not name.startswith("grad/")}
    file = folder / "answer.safetensors"
    save_file(found, file)
    job = Job("onnxruntime", Path(f"{program}.onnx"), program, "run", "export")
    answer = Answer(job, "done", calls={1: file})
    described = {**PROGRAM, "outputs": outputs}
    rows = tuple(judged(answer, sample, described, None))
    again = SecondLook(lambda: model, lambda _: None, Spent())
    rows = again.judged(answer, sample, described, None, rows)
    assert [row.tensor for row in rows] == list(found)
    return [row.tensor for row in rows if row.verdict != "pass"], again


def test_integers_of_numbers_are_choices() -> None:
    x = torch.tensor([2.0, 1.0, 3.0])
    with Choices() as choices:
        x.topk(2), x.argmax(), torch.sort(x), x.long(), x.max(0)
        x > 1, x + 1, torch.arange(3) + 1, x.view(torch.int32)  # none
        F.max_pool1d(x[None], 2, return_indices=True), torch.empty_like(x, dtype=torch.int64)
    assert [name for name, _ in choices.made] == ["topk", "argmax", "sort", "long", "max"]


def test_what_has_no_values_is_no_choice() -> None:
    x = torch.rand(4)
    with Choices() as choices:
        torch.func.vmap(lambda row: row.argsort())(x[None])
        torch.ones(3, device="meta").argsort()
        torch.eye(3).to_sparse().long()
        torch.jit.trace(lambda t: t.topk(2).indices, (x,), check_trace=False)
        torch.topk(input=x, k=2)
    assert [name for name, _ in choices.made] == ["topk"]


def test_choices_differ_by_what_was_chosen() -> None:
    runs = []
    for x in ([2.0, 1.0, 3.0], [2.5, 1.0, 3.5], [2.0, 1.0, 0.0]):
        with Choices() as choices:
            torch.tensor(x).topk(2), torch.tensor(x).argmin()
        runs.append(choices)
    first, moved, other = runs
    assert first.otherwise(moved) == []
    assert first.otherwise(other) == ["topk", "argmin"]
    with Choices() as none:
        torch.ones(3).exp()
    assert first.otherwise(none) == []


def test_the_integers_of_a_reference_are_the_same_in_every_run(tmp_path: Path) -> None:
    """An op's own are seen in the truth and in the baseline: else these have nothing in common."""

    def sampled(net: Best, x: Tensor) -> Tensor:
        value = x.reshape(1, -1, 1, 4)
        places = torch.sigmoid(net.w[:6]).reshape(1, 3, 1, 1, 1, 2)
        weights = torch.ones(1, 3, 1, 1, 1, dtype=x.dtype)
        shapes = torch.tensor([[5, 6]])
        y = ms_deform_attn(value, shapes, torch.tensor([0]), places, weights)
        return tied(net, x) + y.sum()

    (sample,) = truth.compute(model_of(Best(sampled)), [CASE], tmp_path)
    assert sample.chooses
    assert sample.undecided == ("topk",)


def test_booleans_are_on_no_side_of_a_choice(tmp_path: Path) -> None:
    class Masked(Best):
        def forward(self, x: Tensor) -> Results:
            return {**super().forward(x), "mask": x > 0}

    model = model_of(Masked(tied))
    (sample,) = truth.compute(model, [CASE], tmp_path)
    jumps = truth.jumps(model, sample, {})
    assert jumps.found
    assert all("mask" not in jump and "places" in jump for jump in jumps.found.values())


def test_what_most_computations_choose_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for alike, undecided in ((4, ()), (3, ("topk",))):
        calls = itertools.count()
        monkeypatch.setattr(
            Choices,
            "otherwise",
            lambda *_: ["topk"] if next(calls) >= alike else [],  # noqa: B023
        )
        (sample,) = truth.compute(model_of(Best(plain)), [CASE], tmp_path)
        assert next(calls) == 8
        assert sample.undecided == undecided


@pytest.mark.parametrize("program", ["forward", "gradient"])
@pytest.mark.parametrize("take", TAKES)
def test_another_choice_is_right_where_a_rounding_decides(
    take: str, program: str, tmp_path: Path
) -> None:
    model, sample = nearly_tied(tmp_path, take)
    wrong, again = looked(model, sample, results(model, sample, swapped=False), tmp_path, program)
    assert (wrong, again.notes()) == ([], ())
    wrong, again = looked(model, sample, results(model, sample, swapped=True), tmp_path, program)
    assert wrong == []
    (note,) = again.notes()
    assert "of the next in an order" in note


def test_places_alone_are_explained_too(tmp_path: Path) -> None:
    """Their baseline is exact, and so their bound zero."""

    class Places(Best):
        def forward(self, x: Tensor) -> Results:
            return {"places": super().forward(x)["places"]}

    model, sample = nearly_tied(tmp_path)
    net = Places(plain)
    net.load_state_dict(model.module.state_dict())
    model, own = model_of(net), replace(sample, none=("grad/x", "grad/w"))
    own = replace(own, expected={"places": sample.expected["places"]})
    assert own.expected["places"].baseline.max_abs == 0.0
    for wanted, column in (([], 1), (["places"], 2)):
        places = load_file(sample.file)["truth/places"]
        places[1, [0, column]] = places[1, [column, 0]]
        wrong, _ = looked(
            model, own, {"places": places}, tmp_path, "forward", PROGRAM["outputs"][1:]
        )
        assert wrong == wanted


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


@pytest.fixture
def undecided(tmp_path: Path) -> tuple[Model, Sample]:
    model = model_of(Best(tied))
    (sample,) = truth.compute(model, [CASE], tmp_path)
    assert sample.undecided == ("topk",)
    assert read_all(tmp_path) == (sample,)
    return model, sample


def verdicts(sample: Sample, found: Results, tolerances: Tolerances | None = None) -> Results:
    file = sample.file.with_name("answer.safetensors")
    save_file(found, file)
    job = Job("onnxruntime", Path("gradient.onnx"), "gradient", "run", "export")
    rows = judged(Answer(job, "done", calls={1: file}), sample, PROGRAM, tolerances)
    return {row.tensor: (row.verdict, row.reason) for row in rows}


def test_of_what_rounding_decides_nothing_is_said(undecided: tuple[Model, Sample]) -> None:
    model, sample = undecided
    found = verdicts(sample, results(model, sample, swapped=False))
    assert found["values"][0] == found["grad/x"][0] == found["grad/w"][0] == "unsupported"
    assert "in float32 rounding decides what topk gives" in found["values"][1]
    (note,) = doubts([sample])
    assert note.startswith("export: rounding decides what topk gives")


def cut(net: Best, x: Tensor) -> Tensor:
    """Fewer than four are not zero."""
    return F.relu(x * net.w - 3)


class BestScores(Best):
    def forward(self, x: Tensor) -> Results:
        return {"values": self.scores(self, x).topk(4).values}


def test_equal_values_are_taken_in_any_order(tmp_path: Path) -> None:
    """torch takes some, ONNX the first: what hangs on which is undecided, and the rest is not."""
    for name in ("places", "scores"):
        (tmp_path / name).mkdir()
    net = Best(cut)
    (sample,) = truth.compute(model_of(net), [CASE], tmp_path / "places")
    assert sample.undecided == ("topk",)
    x = load_file(sample.file)["input/x"]
    first = FirstOfEqual()
    with first:
        found = {name: t.detach() for name, t in net(x).items()}
    assert first.otherwise
    wanted = cut(net, x).sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(found["places"], wanted)
    verdict, reason = verdicts(sample, found)["values"]
    assert verdict == "unsupported"
    assert "decides what topk gives" in reason
    (sample,) = truth.compute(model_of(BestScores(cut)), [CASE], tmp_path / "scores")
    assert sample.undecided == ()


def test_what_no_choice_makes_is_wrong_all_the_same(undecided: tuple[Model, Sample]) -> None:
    model, sample = undecided
    found = results(model, sample, swapped=False)
    for wrong, said in (
        ({"values": found["values"] * 100}, "off by"),
        ({"values": found["values"].double()}, "dtype float64"),
        ({"values": found["values"][:, :3].contiguous()}, "shape 3×3"),
        ({"values": found["values"] * torch.nan}, "another pattern of NaN"),
    ):
        verdict, reason = verdicts(sample, found | wrong)["values"]
        assert (verdict, said in reason) == ("fail", True), reason


def test_what_hangs_on_no_choice_is_judged(undecided: tuple[Model, Sample]) -> None:
    """As a gradient that is zero by symmetry, of which rounding leaves something small."""
    model, sample = undecided
    known = sample.expected["grad/w"]
    scale = known.scale.max_abs
    for baseline, off, verdict in (
        (1e-9, 0.0, "pass"),
        (1e-9, 7e-7 * scale, "fail"),
        (1e-9, 1e-3, "fail"),
        (1e-2, 0.0, "pass"),
        (1e-1, 0.0, "unsupported"),
        (1e-1, 0.5 * scale, "unsupported"),
        (1e-1, scale, "fail"),
    ):
        own = Norms(known.scale.max_abs * baseline, known.scale.rms * baseline)
        little = replace(known, baseline=own)
        one = replace(sample, expected={**sample.expected, "grad/w": little})
        with opened(sample) as exact:
            value = exact("grad/w").float()
        value[0] += off
        found = {**results(model, sample, swapped=False), "grad/w": value}
        assert verdicts(one, found)["grad/w"][0] == verdict, (baseline, off)
    half = replace(known, baseline=Norms(0.5 * scale, 0.5 * known.scale.rms))
    one = replace(sample, expected={**sample.expected, "grad/w": half})
    zeros = results(model, sample, swapped=False) | {"grad/w": torch.zeros(40)}
    assert verdicts(one, zeros)["grad/w"] == ("fail", "exactly zero where the model's is not")
    nothing = Expected("float32", Norms(1e-17, 1e-17), Norms(5e-8, 5e-8))
    one = replace(sample, expected={**sample.expected, "grad/w": nothing})
    stored = load_file(sample.file)
    stored["truth/grad/w"] = torch.full((40,), 1e-17, dtype=torch.float64)
    save_file(stored, sample.file)
    for value, verdict in ((5e-8, "pass"), (2e-7, "unsupported"), (1e-3, "fail")):
        found = results(model, sample, swapped=False) | {"grad/w": torch.full((40,), value)}
        assert verdicts(one, found)["grad/w"][0] == verdict


def test_a_users_tolerance_decides(undecided: tuple[Model, Sample]) -> None:
    model, sample = undecided
    found = results(model, sample, swapped=False)
    for allowed, verdict in ((10.0, "pass"), (1e-9, "fail")):
        tolerances = Tolerances.everywhere(Tolerance(allowed))
        assert verdicts(sample, found, tolerances)["values"][0] == verdict


def test_another_truth_of_what_rounding_decides_is_no_other_model(
    undecided: tuple[Model, Sample],
) -> None:
    """A truth that was computed elsewhere may choose otherwise, in float64 too."""
    _, sample = undecided
    again = replace(sample, file=sample.file.with_name("again.safetensors"))
    stored = load_file(sample.file)
    stored["truth/values"] = stored["truth/values"].flip(1)
    save_file(stored, again.file)
    rows = {row.tensor: row.verdict for row in repeated([sample], [again])}
    assert rows["values"] == "unsupported"
    assert rows["grad/w"] == "pass"
    stored["truth/values"] *= torch.nan
    save_file(stored, again.file)
    rows = {row.tensor: row.verdict for row in repeated([sample], [again])}
    assert rows["values"] == "fail"
