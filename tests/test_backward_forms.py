"""Every form of backward gives the same gradient, and each catches what is wrong in it alone."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api
from fuseport.exporter.child.spent import Spent
from fuseport.exporter.program.backward_forms import AT_ONCE, FORMS, Asked, agree, plain
from fuseport.exporter.runtimes._forms import run_forms
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.verify.op_check import check
from fuseport.exporter.verify.report import FLOAT64
from fuseport.exporter.verify.report.untried import untried
from fuseport.ops import OPS


def product(backward: Callable[[Any, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """`x * y` with a backward of one's own."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Any:
            return backward(ctx, cotangent)

    return Product.apply


def asked(function: Callable[[Tensor, Tensor], Tensor]) -> Asked:
    torch.manual_seed(0)
    weight = torch.randn(3, 4, requires_grad=True)

    def run(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"out": function(inputs["x"].tanh(), weight).exp()}

    return Asked(run, {"x": torch.randn(3, 4)}, {"weight": weight}, {"out": torch.randn(3, 4)})


def wrong_forms(question: Asked) -> set[str]:
    """Those that raise, or differ from the plain form."""
    expected = plain(question)
    wrong = set()
    for name, form in FORMS.items():
        try:
            found = list(form(question))
        except RuntimeError:
            wrong.add(name)
            continue
        assert found
        assert all(gradients for gradients, _ in found)
        for gradients, factor in found:
            if not all(agree(g, expected[n], factor) for n, g in gradients.items()):
                wrong.add(name)
    return wrong


def test_a_model_may_hand_out_its_parameter() -> None:
    """Reentrant checkpointing put its node on such a parameter, and went round without end."""
    question = asked(torch.mul)
    run, (weight,) = question.run, question.parameters.values()
    outputs = {"out": torch.randn(3, 4), "itself": torch.randn(3, 4)}
    handing_out = Asked(
        lambda inputs: {**run(inputs), "itself": weight},
        question.inputs,
        question.parameters,
        outputs,
    )
    assert wrong_forms(handing_out) <= {"of inputs used twice"}  # a sum in another order
    assert weight.is_leaf


def right(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return cotangent * y, cotangent * x


def of_magnitudes(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return cotangent.abs() * y, cotangent * x


def reuses_a_buffer() -> Callable[[Any, Tensor], Any]:
    """The gradient of an earlier call changes when the next is computed."""
    buffer = torch.zeros(3, 4)

    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return buffer.add_(cotangent * y), cotangent * x

    return backward


def spoils_what_it_saved(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    x, y = x.clone(), y.data
    ctx.count = getattr(ctx, "count", 0) + 1
    return cotangent * y * ctx.count, cotangent * x


def takes_both_for_wanted(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return cotangent * y, cotangent * x if all(ctx.needs_input_grad) else cotangent


def drops_what_is_wanted_alone(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, y = ctx.saved_tensors
    return (cotangent * y, cotangent * x) if all(ctx.needs_input_grad) else (None, None)


def shares_a_scratch() -> Callable[[Any, Tensor], Any]:
    """A race: what one thread computes in a global another one overwrites."""
    scratch: dict[str, Tensor] = {}
    both = threading.Barrier(2)  # so that the race is always run

    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        mine = threading.get_ident()
        scratch["owner"] = torch.tensor(mine)
        if threading.current_thread() is not threading.main_thread():
            both.wait(60)
        factor = 1.0 if int(scratch["owner"]) == mine else 2.0
        return cotangent * y * factor, cotangent * x

    return backward


def of_threads(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return cotangent * y * (2.0 if torch.get_num_threads() == 1 else 1.0), cotangent * x


BUGS: dict[str, tuple[Callable[[], Callable[[Any, Tensor], Any]], set[str]]] = {
    "the sign of the cotangent": (lambda: of_magnitudes, {"of the opposite cotangents"}),
    "a buffer of an earlier call": (
        reuses_a_buffer,
        {"accumulated over two calls", "of inputs used twice"},
    ),
    "state in the graph": (lambda: spoils_what_it_saved, {"again through a retained graph"}),
    "which gradients are wanted": (lambda: takes_both_for_wanted, {"of one input alone"}),
    "a race between threads": (shares_a_scratch, {AT_ONCE}),
    "the number of threads": (lambda: of_threads, {"on one thread"}),
}


@pytest.fixture(autouse=True)
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_right_gradient_is_the_same_in_every_form() -> None:
    assert wrong_forms(asked(product(right))) == set()
    assert wrong_forms(asked(torch.mul)) == set()


@pytest.mark.parametrize("bug", BUGS)
def test_a_gradient_that_is_wrong_in_one_form_is_caught_there(bug: str) -> None:
    make, forms = BUGS[bug]
    assert forms <= wrong_forms(asked(product(make())))


def test_a_function_that_keeps_a_state_of_its_forward_is_caught_by_checkpointing() -> None:
    calls = []

    def stateful(x: Tensor, y: Tensor) -> Tensor:
        calls.append(0)
        return x * y * (len(calls) % 2 + 1)

    found = wrong_forms(asked(stateful))
    assert {"with activation checkpointing", "with reentrant activation checkpointing"} & found


def test_hooks_that_are_not_called_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.register_hook
    monkeypatch.setattr(
        torch.Tensor, "register_hook", lambda tensor, hook: real(tensor, lambda gradient: None)
    )
    assert wrong_forms(asked(torch.mul)) == {"with gradient hooks"}


def test_complex_gradients_are_the_same_too() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, dtype=torch.complex64)}
    question = Asked(
        lambda given: {"y": (given["x"] * (1 + 2j)).exp()},  # type: ignore[operator]
        inputs,
        {},
        {"y": torch.randn(4, dtype=torch.complex64)},
    )
    assert wrong_forms(question) == set()


class TestSessions:
    def run(self, function: Any, folder: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        weight = torch.randn(3, 4, requires_grad=True)
        session = ModuleSession(
            lambda x: function(x, weight), [("weight", weight)], lambda out: {"out": out}
        )
        inputs, cotangents = {"x": torch.randn(3, 4)}, {"out": torch.randn(3, 4)}
        return run_forms(
            session, "autograd forms", inputs, cotangents, lambda n: folder / str(n), Spent()
        )

    def test_what_agrees_bit_for_bit_hands_nothing_back(self, tmp_path: Path) -> None:
        found = self.run(torch.mul, tmp_path)
        assert found["calls"] == [1]
        assert {form["name"] for form in found["forms"]} == set(FORMS)
        assert not [f for f in found["forms"] if f["call"] or f["error"]]
        assert [path.name for path in tmp_path.iterdir()] == ["1"]

    def test_what_differs_is_handed_back_to_be_judged(self, tmp_path: Path) -> None:
        found = self.run(product(of_magnitudes), tmp_path)
        [wrong] = [form for form in found["forms"] if form["call"]]
        assert wrong["name"] == "of the opposite cotangents"
        assert found["calls"] == [1, wrong["call"]]
        assert (tmp_path / str(wrong["call"])).exists()

    def test_a_gradient_that_is_missing_in_a_form_is_an_error(self, tmp_path: Path) -> None:
        found = self.run(product(drops_what_is_wanted_alone), tmp_path)
        errors = {form["name"]: form["error"] for form in found["forms"] if form["error"]}
        assert "grad/weight is not there" in errors["of one input alone"]


def test_every_artifact_with_a_gradient_has_its_forms_in_the_report(
    small_bundle: tuple[Path, str],
) -> None:
    bundle, model = small_bundle
    runtimes = ["eager", "torchscript", "onnxruntime"]
    report = api.verify(bundle, model=model, runtime=runtimes)
    assert report.exit_code(strict=True) == 0, report.failures()
    forms = [row for row in report.results if row.way.endswith("forms")]
    found: dict[tuple[str, str], set[str]] = {}
    for row in forms:
        found.setdefault((row.runtime, row.artifact), set()).add(row.tensor)
    assert len({row.case for row in forms}) == 1
    by_program = {"of the opposite cotangents", "accumulated over two calls"}
    assert found == {
        ("eager", "model"): set(FORMS),
        ("torchscript", "forward.pt"): set(FORMS),
        ("torchscript", "gradient.pt"): by_program,
        ("onnxruntime", "gradient.onnx"): by_program,
    }
    [absent] = untried(report.results)
    assert set(absent.forms) == set(FORMS) - by_program
    assert absent.places == (("gradient.pt", "torchscript"), ("gradient.onnx", "onnxruntime"))
    assert {row.runtime for row in report.results} == {*runtimes, FLOAT64}


def test_a_form_that_torch_does_not_have_of_functions_of_torch_func_is_no_failure(
    saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]], tmp_path: Path
) -> None:
    code = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x):
        return torch.func.grad(lambda t: super(Net, self).forward(t).square().sum())(x)
"""
    _, checkpoint, model = saved_net(code)
    api.export(
        checkpoint, tmp_path / "b", model=model, inputs="x:[batch,3]", format="exported_program"
    )
    report = api.verify(tmp_path / "b", model=model, runtime="eager")
    assert report.exit_code() == 0, report.failures()
    others = [row for row in report.results if row.verdict != "pass"]
    kinds = {"with activation checkpointing", "with reentrant activation checkpointing"}
    assert {row.tensor for row in others} == kinds
    assert all(row.verdict == "unsupported" for row in others)
    assert all("torch.func" in str(row.reason) for row in others)


def test_an_op_is_checked_in_every_form() -> None:
    report = check([OPS["swiglu"]], only=["backward forms"], cases=2)
    [row] = report.results
    assert row.verdict == "pass", row.reason
    assert row.trials >= 2 * len(FORMS)
