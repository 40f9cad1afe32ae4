"""Autograd functions of a model's own: inlined for truth, their own backward held against that."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.capture import blockers
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.verify.report import OWN_BACKWARD

# h[t] = a[t] h[t-1] + x[t], by doubling (Hillis and Steele, 1986), in the memory of its clones:
# autograd could not differentiate it, and its backward, from the other end, is its own.
NET = """
import torch

def scanned(a, x):
    step = 1
    while step < x.shape[1]:
        x[:, step:] += a[:, step:] * x[:, :-step].clone()
        a[:, step:] *= a[:, :-step].clone()
        step *= 2
    return x

class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        h = scanned(a.clone(), x.clone())
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        a, h = ctx.saved_tensors
        after = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1).flip(1)
        dx = scanned(after, dh.flip(1).clone()).flip(1)
        before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        return dx * before, dx

scan = Scan.apply

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        return scan(torch.sigmoid(self.a(x)), x)
"""


@pytest.mark.parametrize("right", [True, False])
def test_a_function_that_works_in_place_has_a_truth(
    right: bool, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    code = NET if right else NET.replace("dx * before", "dx * h")
    checkpoint, model = saved_with(code, a=torch.nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,7,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model)
    failed = {(row.runtime, row.way) for row in report.results if row.verdict != "pass"}
    assert failed == (set() if right else {("eager", OWN_BACKWARD)})
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    gradients = {row.runtime for row in report.results if row.tensor == "grad/a.weight"}
    assert {"float64", "eager", "torchscript", "exported_program", "onnxruntime"} <= gradients


WRITES = """
import torch

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        x /= torch.sqrt(x.var(1, keepdim=True) + 1e-5)
        return Square.apply(self.a(x))
"""


@pytest.mark.parametrize("right", [True, False])
def test_a_backward_is_checked_in_a_model_that_writes_in_place(
    right: bool, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = WRITES if right else WRITES.replace("2 * x", "3 * x")
    checkpoint, model = saved_with(code, a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=["onnx"])
    report = api.verify(bundle.folder, model=model, runtime=["eager"], localise=False)
    assert report.exit_code() == (0 if right else 1)
    own = [row for row in report.results if row.way == OWN_BACKWARD]
    assert {"grad/x", "grad/a.weight"} <= {row.tensor for row in own}
    failed = {row.tensor for row in own if row.verdict == "fail"}
    assert failed == (set() if right else {"grad/x", "grad/a.weight", "grad/a.bias"})
    # Where it is not compared, in runtimes that were chosen or without the code, it is told.
    report = api.verify(bundle.folder, runtime=["onnxruntime"])
    assert report.exit_code() == 0
    said = [note for note in report.notes if "own backward of Square" in note]
    assert len(said) == (0 if right else 1)


def test_what_a_function_writes_over_is_kept_for_its_gradient() -> None:
    scope: dict[str, type[torch.autograd.Function]] = {}
    exec(NET, scope)
    generator = torch.Generator().manual_seed(0)
    a, x = (torch.rand(2, 9, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    with own_backward.inlined(), own_backward.saving_copies():
        assert torch.autograd.gradcheck(
            scope["Scan"].apply, (a.requires_grad_(), x.requires_grad_())
        )
    with own_backward.inlined(), pytest.raises(RuntimeError, match="inplace operation"):
        scope["Scan"].apply(a, x).sum().backward()


class Cube(torch.autograd.Function):
    """x³, with a backward that says it is 7."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        mark = x.sign()
        ctx.mark_non_differentiable(mark)
        return x**3, mark

    @staticmethod
    def backward(ctx, dout, _):  # type: ignore[no-untyped-def, override]
        return 7 * dout


class Square(torch.autograd.Function):
    """x², in the style with `setup_context`."""

    @staticmethod
    def forward(x):  # type: ignore[no-untyped-def]
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        return 7 * dout


def test_inlined_functions_have_the_gradient_of_their_forward() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    with own_backward.watched():
        kept = Square.apply
    for _ in range(2):
        with own_backward.inlined(), own_backward.seen() as names:
            cube, mark = Cube.apply(x)
            square = kept(x)
        assert list(names) == ["Cube", "Square"]
        assert not mark.requires_grad
        assert torch.autograd.grad(cube, x)[0] == 12
        assert torch.autograd.grad(square, x)[0] == 4
        assert torch.autograd.grad(Cube.apply(x)[0] + kept(x), x)[0] == 14


class Hidden(torch.autograd.Function):
    """As forwards of extensions are often written, which are run without autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.empty_like(x)
            y.copy_(x**3)
            assert torch.nn.init.ones_(torch.empty(1, requires_grad=True)).is_leaf  # torch's own
        return y

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 7 * dout


def test_no_grad_hides_nothing_of_a_forward() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    with own_backward.inlined():
        assert torch.autograd.grad(Hidden.apply(x), x)[0] == 12
        with torch.no_grad():
            assert not Hidden.apply(x).requires_grad
            assert not (x * 2).requires_grad
        assert (x * 2).requires_grad
    assert torch.autograd.grad(Hidden.apply(x), x)[0] == 7


def test_functions_are_inlined_where_apply_is_a_method_of_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is from torch 2.15 on."""
    base = torch._C._FunctionBase  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.autograd.Function, "apply", base.__dict__["apply"])
    found = importlib.util.find_spec(own_backward.__name__)
    assert found is not None
    assert found.loader is not None
    there = importlib.util.module_from_spec(found)
    found.loader.exec_module(there)
    x = torch.tensor([2.0], requires_grad=True)
    with there.inlined(), there.seen() as names:
        assert torch.autograd.grad(Cube.apply(x)[0], x)[0] == 12
    assert list(names) == ["Cube"]
    with there.seen():
        assert torch.autograd.grad(Cube.apply(x)[0], x)[0] == 7
    assert blockers.find(lambda: Cube.apply(x)) == ()


CHECKPOINTED = """
import torch
from torch.utils.checkpoint import checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = torch.nn.Linear(3, 3)

    def forward(self, x):
        return checkpoint(self.b, self.a(x), use_reentrant=True)
"""


def test_reentrant_checkpoints_have_gradients(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    layers = {"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)}
    checkpoint, model = saved_with(CHECKPOINTED, **layers)
    inputs, wanted = parse_inputs(["x:[batch,3]"]), ["torchscript"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    compared = {row.tensor for row in report.results if row.runtime == "torchscript"}
    assert {"grad/a.weight", "grad/b.weight"} <= compared


def test_a_checkpoint_goes_through_a_scripted_function() -> None:
    """TorchScript's interpreter makes another error of what ends a forward pass early."""

    @torch.jit.script
    def squashed(x: torch.Tensor, factor: int) -> torch.Tensor:
        for i in range(factor):
            x = x + i
        return x.tanh()

    x = torch.randn(3, 4, requires_grad=True)
    with own_backward.without_reentry():
        y = torch.utils.checkpoint.checkpoint(squashed, x, 3, use_reentrant=True)
        (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 1 - y.detach() ** 2)


UNSEEN = """
import torch

class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(by)
        {forward}

    @staticmethod
    def backward(ctx, dy):
        (by,) = ctx.saved_tensors
        a, b = dy.chunk(2, -1)
        return torch.cat([a * by, b / by], -1), None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        return Turn.apply(self.a(x), torch.full((), 0.5)).square()
"""


@pytest.mark.parametrize(
    "forward",
    [
        "a, b = x.detach().chunk(2, -1); a.copy_(a * by); b.copy_(b / by); return x",
        "y = torch.empty_like(x); y.data.copy_(torch.cat([x[..., :4] * by, x[..., 4:] / by], -1));"
        " return y",
        "a, b = torch.detach(x).data.chunk(2, -1); return torch.cat([a * by.data, b / by], -1)",
    ],
)
def test_a_forward_may_detach(
    forward: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """It is run without autograd, so that this changes nothing of what it computes."""
    checkpoint, model = saved_with(UNSEEN.format(forward=forward), a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert any(row.way == OWN_BACKWARD for row in report.results)


def test_what_autograd_does_not_see_has_no_gradient_program(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    forward = "a, b = torch.ops.aten.detach(x).chunk(2, -1); a.copy_(a * by); b.copy_(b / by)"
    forward += "; return x"
    checkpoint, model = saved_with(UNSEEN.format(forward=forward), a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    with pytest.raises(ExportFailed, match="autograd does not see what Turn computes"):
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)


@pytest.mark.parametrize(
    "parts",
    [
        "x.chunk(2, -1)",
        "torch.split(x, 4, dim=-1)",
        "torch.chunk(input=x, chunks=2, dim=-1)",
        "torch.split(tensor=x, split_size_or_sections=4, dim=-1)",
        "x.unflatten(-1, (2, 4)).unbind(-2)",
    ],
)
def test_a_forward_may_write_into_parts(
    parts: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """Without autograd, as a function's forward is run, there is nothing against it."""
    code = UNSEEN.format(forward=f"a, b = {parts}; a.mul_(by); b.div_(by); return x")
    checkpoint, model = saved_with(code, a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert any(row.way == OWN_BACKWARD for row in report.results)


def test_a_backward_that_is_wrong_is_told_by_its_name(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = UNSEEN.format(forward="a, b = x.chunk(2, -1); return torch.cat([a * by, b / by], -1)")
    verdicts = {}
    wrong = code.replace("torch.cat([a * by, b / by], -1), None", "dy, None")
    for name, text in (("right", code), ("wrong", wrong)):
        scope: dict[str, Any] = {}
        exec(text, scope)
        with own_backward.seen() as found, torch.no_grad():
            scope["Net"]()(torch.randn(3, 8))
        verdicts[name] = found["Turn"]
    assert verdicts == {"right": "right", "wrong": "wrong"}
    both = WRITES.replace(
        "class Net",
        "class Turn" + wrong.partition("class Turn")[2].partition("class Net")[0] + "class Net",
    )
    both = both.replace(
        "Square.apply(self.a(x))", "Turn.apply(Square.apply(self.a(x)), x.new_ones(()) / 2)"
    )
    checkpoint, model = saved_with(both, a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=["onnx"])
    said = "the model's own backward of Turn is not the gradient of its forward"
    assert any(said in note for note in bundle.manifest["notes"])
    report = api.verify(bundle.folder, model=model, runtime=["eager"], localise=False)
    assert report.exit_code() == 1
    reasons = {row.reason for row in report.results if row.verdict == "fail"}
    assert all("own backward (Turn) is not" in str(reason) for reason in reasons)


def test_a_backward_in_float32_is_right_where_its_slope_is_small() -> None:
    """Of float32, the roundings are more than a slope near 0 bears."""

    class Curve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            y: torch.Tensor = torch.sigmoid(x.to(torch.float32) * 3).to(x.dtype)
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            y = 1 / (1 + torch.exp(-3 * x.to(torch.float32)))
            dx: torch.Tensor = (dy.to(torch.float32) * 3 * y * (1 - y)).to(x.dtype)
            return dx

    for seed in range(20):
        x = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        with own_backward.seen() as found:
            Curve.apply(x)
        assert found == {"Curve": "right"}


DRAWS = """
import random
import torch

class Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy + {random} * x.sign()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Balance.apply(self.a(x))
"""


@pytest.mark.parametrize(
    ("number", "verdict"),
    [("random.random()", "unsupported"), ("torch.rand(())", "unsupported"), ("0.5", "fail")],
)
def test_a_backward_that_draws_at_random_is_held_against_nothing(
    number: str, verdict: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(DRAWS.format(random=number), a=torch.nn.Linear(4, 4))
    inputs = parse_inputs(["x:[batch,4]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=["onnx"])
    runtime = ["eager", "onnxruntime"]
    report = api.verify(bundle.folder, model=model, runtime=runtime, localise=False)
    own = [row for row in report.results if row.way == OWN_BACKWARD]
    found = {row.verdict for row in own if row.tensor == "grad/a.weight"}
    assert found == {verdict}
    assert {row.verdict for row in own} == {"pass", verdict}  # outputs, among others
    reasons = {row.reason for row in own if row.verdict == "unsupported"}
    assert all("draws random numbers" in str(reason) for reason in reasons)
    assert bool(reasons) is (verdict == "unsupported")
    rest = {row.verdict for row in report.results if row.way != OWN_BACKWARD}
    assert rest == {"pass"}
