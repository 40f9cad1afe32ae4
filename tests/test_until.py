"""Loops until a value is reached, torch's `while_loop`: any number of turns, none too."""

import ast
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.user_code import while_loop
from fuseport.exporter.verify.localise import script_file
from fuseport.tests.as_files import session_of

while_loop.allow()  # as where a model's code is imported

SavedWith = Callable[..., tuple[Path, str]]

Loop = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...]], Any]


def in_python(condition: Callable[..., Any], body: Callable[..., Any], carried: Any) -> Any:
    while condition(*carried):
        carried = body(*carried)
    return carried


class Net(nn.Module):
    """What is done to what a linear layer gives, by a loop of torch's or of Python's."""

    def __init__(self, function: Callable[[Loop, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.layer, self.function = nn.Linear(4, 4, dtype=torch.float64), function

    def forward(self, x: Tensor, loop: Loop = torch.while_loop) -> Tensor:
        return self.function(loop, self.layer, x)


def large(h: Tensor) -> Tensor:
    return h.abs().max() > 0.25


def settled(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    """Nothing that is carried has a gradient before the first turn."""
    (h,) = loop(large, lambda h: (layer(h).tanh() * h * 0.9,), (x.detach() * 1,))
    return h * 2 + x


def counted(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    def going(n: Tensor, h: Tensor) -> Tensor:
        return (n < 5) & large(h)

    def turn(n: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return n + 1, (layer(h) / (2 + n)).sin()

    n, h = loop(going, turn, (torch.zeros((), dtype=torch.int64), x * 2))
    return h * (1 + n)


def one_after_another(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    y, even = loop(
        lambda y, even: large(y),
        lambda y, even: (layer(y).tanh() * y * 0.9, ~even),
        (x, x[0, 0] > 9),
    )
    z = torch.where(even, y, 3 * y)
    z, _ = loop(lambda z, y: large(z), lambda z, y: (z * 0.6 + 0.1 * y * z, y * 0.9), (z, y * 1))
    return z + y


def about_where_it_began(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    """What is carried first is asked for in each turn."""

    def turn(h: Tensor, x_: Tensor) -> tuple[Tensor, Tensor]:
        return h * 0.7 * (x - h).cos() * layer(h).tanh(), x_.sin()

    h, sines = loop(lambda h, _: large(h / (1 + x.abs())), turn, (x, x))
    return h * sines


def to_nothing(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    """A turn more would go through a root at 0, whose derivative is infinite."""

    def turn(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return h - 1, y * 0.5 + h.sqrt() * layer(y).tanh()

    three = 3 + (x - x.detach()).sum()
    return loop(lambda h, y: h > 0, turn, (three, x))[1]


def within_a_branch(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        return loop(large, lambda h: (h * 0.5 * h.cos(),), (x * 1,))[0]

    if loop is in_python:
        return yes(x) if x.sum() > 0 else x.sin()
    return torch.cond(x.sum() > 0, yes, torch.sin, (x,))


FUNCTIONS: dict[str, Callable[[Loop, nn.Module, Tensor], Tensor]] = {
    "settled": settled,
    "counted": counted,
    "one after another": one_after_another,
    "about where it began": about_where_it_began,
    "to nothing": to_nothing,
    "within a branch": within_a_branch,
}
NAMES = ("y", "grad/x", "grad/layer.weight", "grad/layer.bias")
SPEC = TensorSpec("x", "float64", ("batch", 4))
SCALES = (0.01, 0.5, 1.0, -1.0, 3.0, 0.2, -20.0)


def examples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(31)
    draws = (torch.randn(2 + i, 4, generator=generator, dtype=torch.float64) for i in range(9))
    return [scale * x for scale, x in zip(SCALES, draws, strict=False)]


def truth(net: Net, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = net(x, in_python)
    wanted = [x, *net.parameters()]
    found = torch.autograd.grad(y, wanted, cotangent, allow_unused=True)
    both = zip(found, wanted, strict=True)
    return [y.detach(), *(torch.zeros_like(w) if g is None else g for g, w in both)]


def programs(net: Net) -> tuple[Any, Any]:
    x = torch.linspace(-2, 3, 12, dtype=torch.float64).reshape(3, 4)
    forward = capture_forward(net, {"x": x}, [SPEC], ["y"])
    return forward, capture_gradient(forward)


@functools.cache
def programs_of(name: str) -> tuple[Net, Any, Any]:
    net = Net(FUNCTIONS[name])
    return net, *programs(net)


def close(found: Sequence[Tensor], expected: Sequence[Tensor], what: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda m: f"{what} {m}")


@pytest.mark.parametrize("runtime", ["exported_program", "torchscript", "onnxruntime"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_go_round_as_often_as_values_say(name: str, runtime: str, tmp_path: Path) -> None:
    net, forward, gradient = programs_of(name)
    sessions = [session_of(program, tmp_path, runtime) for program in (forward, gradient)]
    names = [spec.name for spec in gradient.outputs]
    assert set(names) <= set(NAMES)
    for x in examples():
        cotangent = torch.randn_like(x)
        expected = dict(zip(NAMES, truth(net, x, cotangent), strict=True))
        found = sessions[0].run({"x": x})
        close([torch.as_tensor(found["y"])], [expected["y"]], x.shape)
        found = sessions[1].run({"x": x, "cotangent_y": cotangent})
        close([torch.as_tensor(found[n]) for n in names], [expected[n] for n in names], x.shape)


def test_autograd_through_the_file_is_right(tmp_path: Path) -> None:
    """Torch's own of a `while_loop` goes through one turn of none, and not from turn to turn where
    what is carried first has no gradient."""
    net, forward, _ = programs_of("settled")
    session = session_of(forward, tmp_path, "exported_program")
    for x in examples():
        cotangent = torch.ones_like(x)
        expected = truth(net, x, cotangent)
        found = session.differentiate({"x": x}, {"y": cotangent})
        close([found[name] for name in NAMES[1:]], expected[1:], x.shape)


def test_integers_that_are_no_tensors_have_no_gradient() -> None:
    def function(loop: Loop, layer: nn.Module, x: Tensor) -> Tensor:
        return loop(lambda n, h: n < 3, lambda n, h: (n + 1, h.sin()), (0, x * 1))[1]

    x = torch.ones(2, 4, dtype=torch.float64)
    forward = capture_forward(Net(function), {"x": x}, [SPEC], ["y"])
    with pytest.raises(ExportFailed, match=r"while_loop of integers: have it carry tensors"):
        capture_gradient(forward)


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        def turn(h):
            h = torch.tanh(self.a(h)) * h * 0.9
            return (h.transpose(0, 1).contiguous().transpose(0, 1),)
        return torch.while_loop(lambda h: h.abs().max() > 0.3, turn, (x * 1,))[0]
"""


def test_a_model_is_exported_and_verified(tmp_path: Path, saved_with: SavedWith) -> None:
    """Its own is a loop of Python's, of any strides, with the right gradient."""
    torch.manual_seed(0)
    checkpoint, model = saved_with(MODEL, a=nn.Linear(4, 4))
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=parse_inputs(["x:[batch,4]"])
    )
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
    gradients = {row.runtime for row in report.results if row.tensor == "grad/a.bias"}
    assert {"eager", "exported_program", "torchscript", "onnxruntime", "libtorch"} <= gradients


IN_PYTHON = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        found = [h]
        {loop}
            h = h * 0.97
            found.append(h)
            {end}
        return torch.stack(found).sum(0)
"""
_LARGE = "h.abs().max() > 0.01"


@pytest.mark.parametrize(
    ("loop", "end"), [(f"while {_LARGE}:", ""), ("while True:", f"if not {_LARGE}: break")]
)
def test_a_loop_of_python_s_is_told_what_takes_its_place(
    loop: str, end: str, tmp_path: Path, saved_with: SavedWith
) -> None:
    checkpoint, model = saved_with(IN_PYTHON.format(loop=loop, end=end), a=nn.Linear(4, 4))
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=parse_inputs(["x:[batch,4]"]))
    (said,) = raised.value.details
    assert re.search(r"decides by a tensor's value, .*; have torch\.while_loop go on", said)


def test_what_is_carried_keeps_its_form() -> None:
    with pytest.raises(TypeError, match="gives something else than it is given"):
        torch.while_loop(lambda h: h < 3, lambda h: (h + 1, h), (torch.zeros(()),))
    first = torch.zeros(())
    (last,) = torch.while_loop(lambda h: h < 0, lambda h: (h + 1,), (first,))
    assert last is not first
    assert torch.equal(last, first)


def test_what_a_loop_gives_is_no_operator_s_of_several() -> None:
    """Failures in a TorchScript file are located by what its operators give."""
    _, _, gradient = programs_of("counted")
    (function,) = ast.parse("def forward(self, x):\n    a, b = torch.while_loop(x)\n").body
    assert isinstance(function, ast.FunctionDef)
    assert script_file._of_several(function, [*gradient.exported.graph.nodes]) == {}
