"""Gradients jump where a value lies within a rounding of a kink: both sides of it are right."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify import baseline, truth
from fuseport.exporter.verify.kinks import Flipped, Near, Sampled
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample
from fuseport.exporter.verify.second_look import SecondLook

SPEC = TensorSpec("x", "float32", ("batch", 40))
ABOVE = 2.4e-7
CASE = Case("export", {"batch": 3}, "contiguous", 0)
PROGRAM = {
    "inputs": [asdict(SPEC)],
    "outputs": [asdict(TensorSpec("output", "float32", ("batch", 40)))],
    "device": "cpu",
    "none": [],
}


class Net(nn.Module):
    """One value in 120 lies near zero, where `function` has its kink."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.rand(40) + 1)
        self.function = function
        self.register_buffer("below", torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.w - self.below) * 3


@dataclass
class Setting:
    model: Model
    sample: Sample
    folder: Path
    column: int

    def looked(self, change: Callable[[dict[str, Tensor]], None]) -> tuple[list[str], SecondLook]:
        """The tensors that are wrong at a second look, of the model's own results with a change."""
        with torch.enable_grad():
            net, x = self.model.module, self.inputs["input/x"].requires_grad_()
            y = net(x)
            grads = torch.autograd.grad(y, [x, net.w], self.inputs["cotangent/output"])
        found = {"output": y.detach(), "grad/x": grads[0], "grad/w": grads[1]}
        change(found)
        file = self.folder / "answer.safetensors"
        save_file(found, file)
        job = Job("onnxruntime", Path("gradient.onnx"), "gradient", "run", "export")
        answer = Answer(job, "done", calls={1: file})
        rows = tuple(judged(answer, self.sample, PROGRAM, None))
        again = SecondLook(lambda: self.model, lambda _: None, Spent())
        rows = again.judged(answer, self.sample, PROGRAM, None, rows)
        assert {row.tensor for row in rows} == set(found)
        return [row.tensor for row in rows if row.verdict == "fail"], again

    @property
    def passed(self) -> dict[str, Tensor]:
        return {"x": self.inputs["input/x"]}

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.sample.file)


def near_zero(net: Net, folder: Path, more: int = 0) -> Setting:
    """The smallest value of a row is above zero by a rounding of a large one, not of its own.

    So are `more` others, nearer to it: the next in size.
    """
    model = Model(net.eval(), "user", {}, (SPEC,), CASE.sizes)
    (folder / "first").mkdir()
    (folder / "truth").mkdir()
    (first,) = truth.compute(model, [CASE], folder / "first")
    from safetensors.torch import load_file

    values = (load_file(first.file)["input/x"] * net.w)[1].detach()
    column, *others = values.abs().argsort()[: 1 + more].tolist()
    net.below[column] = values[column] - ABOVE
    for other in others:
        net.below[other] = values[other] - 0.7 * ABOVE
    (sample,) = truth.compute(model, [CASE], folder / "truth", given={"export": first.file})
    return Setting(model, sample, folder, column)


def other_side(setting: Setting, found: dict[str, Tensor]) -> None:
    """Results of a runtime that rounds the value down to just below zero."""
    net, x, dy = setting.model.module, setting.inputs["input/x"], setting.inputs["cotangent/output"]
    j = setting.column
    found["grad/x"][1, j] -= 3 * dy[1, j] * net.w.detach()[j]
    found["grad/w"][j] -= 3 * dy[1, j] * x[1, j]


def test_the_other_side_of_a_kink_is_right_and_is_told(tmp_path: Path) -> None:
    setting = near_zero(Net(), tmp_path)
    wrong, again = setting.looked(lambda found: other_side(setting, found))
    assert wrong == []
    (note,) = again.notes()
    assert note.startswith("export: 2 tensors are the model's but for values")


def test_of_many_values_those_that_explain_it_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gradients are so large that there is room for those of one value only."""
    monkeypatch.setattr(truth, "_JUMPS", 1)
    setting = near_zero(Net(), tmp_path, more=3)
    with Sampled() as sampled, baseline.moved(setting.model.module, setting.passed, 0) as moved:
        setting.model.module(moved["x"])
    with Near(sampled.samples) as near:
        setting.model.module(setting.passed["x"])
    *_, last = near.places()
    assert len(near.places()) == 4
    assert last == (0, 0, 40 + setting.column)
    wrong, again = setting.looked(lambda found: other_side(setting, found))
    assert wrong == []
    assert len(again.notes()) == 1
    wrong, again = setting.looked(lambda found: found["grad/x"].mul_(1.01))
    assert wrong == ["grad/x"]


def test_beside_a_kink_a_baseline_that_is_small_by_luck_gets_more(tmp_path: Path) -> None:
    """What a kink leaves is a little beyond the bound: more computations are asked for."""
    setting = near_zero(Net(), tmp_path)
    known = setting.sample.expected["grad/x"]
    norms = Norms(known.baseline.max_abs / 30, known.baseline.rms / 30)
    setting.sample.expected["grad/x"] = replace(known, baseline=norms)

    def change(found: dict[str, Tensor]) -> None:
        found["grad/x"] += found["grad/x"].abs().max() * 2e-7
        other_side(setting, found)

    wrong, again = setting.looked(change)
    assert wrong == []
    assert len(again.notes()) == 1


@pytest.mark.parametrize("factor", [1.01, 1.5])
def test_a_wrong_gradient_is_wrong_beside_a_kink(factor: float, tmp_path: Path) -> None:
    setting = near_zero(Net(), tmp_path)
    wrong, again = setting.looked(lambda found: found["grad/x"].mul_(factor))
    assert wrong == ["grad/x"]
    assert again.notes() == ()


def test_without_a_value_at_a_kink_nothing_is_allowed(tmp_path: Path) -> None:
    setting = near_zero(Net(torch.sigmoid), tmp_path)
    wrong, again = setting.looked(lambda found: other_side(setting, found))
    assert wrong == ["grad/x", "grad/w"]
    assert again.notes() == ()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
    "abs": torch.abs,
    "operator": abs,
    "leaky": nn.LeakyReLU(0.1),
    "in place": nn.LeakyReLU(0.1, inplace=True),
    "method in place": lambda x: x.relu_(),
    "returns nothing": lambda x: (F.relu(x, inplace=True), x)[1],
    "prelu": nn.PReLU(),
    "selu": nn.SELU(),
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(0, 9),
    "clamp by name": lambda x: torch.clamp(x, max=0),
    "clamp by tensors": lambda x: torch.clamp(x, torch.zeros_like(x), torch.full((), 9.0)),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_max": lambda x: torch.clamp_max(x, 0),
    "clip in place": lambda x: x.clip_(min=0),
    "hardtanh": nn.Hardtanh(0.0, 9.0),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "minimum": lambda x: torch.minimum(x, torch.zeros_like(x)),
    "max of two": lambda x: torch.max(x, torch.zeros_like(x)),
    "amax": lambda x: beside_zeros(x).amax(-1),
    "amin of dimensions": lambda x: beside_zeros(x).unsqueeze(1).amin((1, -1)),
    "max": lambda x: beside_zeros(x).max(dim=-1).values,
    "max that keeps its dimension": lambda x: beside_zeros(x).max(-1, True)[0].squeeze(-1),
    "min": lambda x: beside_zeros(x).min(-1)[0],
    "sort": lambda x: beside_zeros(x).sort().values[..., 1],
    "sort downwards": lambda x: beside_zeros(x).sort(-1, descending=True)[0][..., 0],
    "stable sort": lambda x: torch.sort(beside_zeros(x), stable=True)[0][..., 1],
    "msort": lambda x: beside_zeros(x).movedim(-1, 0).msort()[0],
    "topk": lambda x: beside_zeros(x).topk(1)[0].squeeze(-1),
    "lowest": lambda x: torch.topk(beside_zeros(x), 1, -1, False)[0].squeeze(-1),
    "kthvalue": lambda x: beside_zeros(x).kthvalue(2).values,
    "median": lambda x: beside_zeros(x).median(-1)[0],
    "max_pool1d": lambda x: F.max_pool1d(beside_zeros(x), 2).squeeze(-1),
    "max_pool2d": lambda x: nn.MaxPool2d((1, 2))(beside_zeros(x)).squeeze(-1),
    "max_pool3d": lambda x: F.max_pool3d(beside_zeros(x)[None], (1, 1, 2))[0].squeeze(-1),
    "with indices": lambda x: F.max_pool1d(beside_zeros(x), 2, return_indices=True)[0].squeeze(-1),
}


def beside_zeros(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x)], -1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_value_nearest_to_zero_changes_sides(name: str) -> None:
    net = Net(FUNCTIONS[name])
    torch.manual_seed(1)
    x = torch.randn(3, 40)
    x[0, 3] = 0.0  # as a padding has it
    value = (x * net.w)[1, 7].detach()
    net.below[7] = torch.nextafter(value, torch.tensor(-torch.inf))
    with Sampled() as sampled, baseline.moved(net, {"x": x}, 0) as inputs:
        net(inputs["x"])
    with Near(sampled.samples) as near:
        plain, slopes = run(net, x)
    each = 2 if "sort" in name and name != "msort" else 1  # gaps of a value: of a sorted row, two
    place = (0, 0, 47 * each)
    assert near.places()[0] == place
    assert (0, 0, 3 * each) not in near.places()
    with Flipped(place):
        y, moved = run(net, x)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=2e-6)
    differs = (moved - slopes).abs() > 0.01
    assert differs.nonzero().tolist() == [[1, 7]]


def test_maxima_of_windows_that_overlap_have_the_value_of_each() -> None:
    """Three windows, of steps 2, with a padding: the third is of 6.0 and of what is next to it."""
    values = [1.0, 2.0, 3.0, 4.0, 6.0, 5.9999995]
    pool = nn.MaxPool1d(3, 2, 1)
    x = torch.tensor(values, requires_grad=True)
    with Sampled() as sampled:
        pool((x * 1.0000002)[None])
    with Near(sampled.samples) as near:
        pool(x[None]).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert near.places() == [(0, 0, 2)]
    x.grad = None
    with Flipped((0, 0, 2)):
        pool(x[None]).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("function", "bounds"),
    [(F.relu6, (0.0, 6.0)), (F.hardswish, (-3.0, 3.0)), (F.hardsigmoid, (-3.0, 3.0))],
)
def test_functions_of_two_kinks_have_both(
    function: Callable[[Tensor], Tensor], bounds: tuple[float, float]
) -> None:
    for number, bound in enumerate(bounds):
        above = torch.nextafter(torch.tensor([bound]), torch.tensor([9.0])).requires_grad_()
        with Sampled() as sampled:
            function(above + 1e-6)
        with Near(sampled.samples) as near:
            function(above).sum().backward()
        (place,) = near.places()
        assert place == (0, number, 0)
        slope, above.grad = above.grad, None
        with Flipped(place):
            function(above).sum().backward()
        assert abs(float(above.grad) - float(slope)) > 0.1


def test_a_maximum_leaves_its_input_as_it_is() -> None:
    """That it is to keep its dimension is no `inplace`."""
    x = torch.tensor([[1.0, 1.0000001]], requires_grad=True)
    with Flipped((0, 0, 0)):
        y = x.exp()
        y.max(-1, True)[0].sum().backward()
    assert x.grad is not None
    assert x.grad[0, 0] > 0 == x.grad[0, 1]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_kth_value_has_a_kink_on_both_sides(k: int) -> None:
    values = torch.tensor([2.0, 2.0000002, 2.0000005])
    x = values.clone().requires_grad_()
    with Sampled() as sampled:
        torch.tensor([2.0, 2.0000007, 2.0000014]).kthvalue(k)
    with Near(sampled.samples) as near:
        x.kthvalue(k).values.backward()
    assert sorted(near.places()) == [(0, number, 0) for number in range(2 if k == 2 else 1)]
    assert x.grad is not None
    before, found = int(x.grad.argmax()), set()
    for place in near.places():
        x.grad = None
        with Flipped(place):
            x.kthvalue(k).values.backward()
        found.add(int(x.grad.argmax()))
    assert (before, found) == (k - 1, {1} if k != 2 else {0, 2})


def test_a_number_has_no_order() -> None:
    x = torch.ones(())
    with Sampled() as sampled:
        x.sort(), x.topk(1), x.kthvalue(1), x.median(), torch.ones(1).median()
    assert [len(kinks) for kinks in sampled.samples] == [0, 0, 0, 0, 0]


def test_a_maximum_of_one_value_has_no_kink() -> None:
    x = torch.ones(3, 1)
    with Sampled() as sampled:
        x.amax(1), x.max(), torch.ones(()).max(), F.max_pool1d(x, 1)
    assert [len(kinks) for kinks in sampled.samples] == [0, 1, 0, 0]


def run(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    return y.detach(), torch.autograd.grad(y.sum(), leaf)[0]
