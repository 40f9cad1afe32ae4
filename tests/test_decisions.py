"""What model code decides by values of tensors: both ways, errors, and what makes no difference."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.capture import decisions
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import Program
from fuseport.exporter.program.refusing import HOLDS, checks
from fuseport.exporter.verify.mutants.onnx_edits import EDITS, sites

HEAD = """
import logging
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.m = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.l(x)
"""

SMALL, LARGE = torch.full((3, 4), 0.1), torch.linspace(-3, 9, 12).reshape(3, 4)

Saved = Callable[..., tuple[Path, str]]


def net(body: str) -> str:
    return HEAD + "\n".join(f"        {line}" for line in body.strip("\n").splitlines()) + "\n"


@pytest.fixture
def exported(saved_with: Saved, tmp_path: Path) -> Callable[[str], tuple[Bundle, str]]:
    def export(body: str) -> tuple[Bundle, str]:
        torch.manual_seed(0)
        checkpoint, model = saved_with(net(body), l=nn.Linear(4, 4), m=nn.Linear(4, 4))
        inputs = parse_inputs(["x:[batch,4]"])
        formats = ["torchscript", "onnx", "exported_program"]
        target = tmp_path / "bundle"
        return api.export(checkpoint, target, model=model, inputs=inputs, format=formats), model

    return export


def the_model(bundle: Bundle, model: str) -> nn.Module:
    spec = importlib.util.spec_from_file_location("again", model.removesuffix(":Net"))
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    module: nn.Module = code.Net()
    module.load_state_dict(torch.load(bundle.folder.parent / "net.pt"))
    return module


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    wanted = {"x": x, **dict(module.named_parameters())}
    y = module(x)
    cotangent = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    found = torch.autograd.grad(y, list(wanted.values()), cotangent, allow_unused=True)
    named = zip(wanted, found, strict=True)
    return {"output": y.detach(), **{f"grad/{n}": g for n, g in named if g is not None}}


def held(bundle: Bundle, module: nn.Module, x: Tensor) -> None:
    """Hold the artifacts against the model at some values."""
    expected = gradients(module, x)
    cotangent = torch.linspace(-1, 1, expected["output"].numel()).reshape_as(expected["output"])
    script = torch.jit.load(bundle.folder / "gradient.pt")(x, cotangent)
    session = onnxruntime.InferenceSession(bundle.folder / "gradient.onnx")
    names = [output.name for output in session.get_outputs()]
    given = {"x": x.numpy(), "cotangent_output": cotangent.numpy()}
    in_onnx = dict(zip(names, map(torch.from_numpy, session.run(None, given)), strict=True))
    program = torch.export.load(bundle.folder / "gradient.pt2").module()(x, cotangent)
    for found in (script, in_onnx, program):
        for name, tensor in found.items():
            wanted = expected.get(name, torch.zeros_like(tensor))
            torch.testing.assert_close(tensor, wanted, msg=lambda said, n=name: f"{n}: {said}")
    plain = torch.jit.load(bundle.folder / "forward.pt")(x)
    torch.testing.assert_close(plain, expected["output"])


BOTH = {
    "a layer": """
if y.max() > 1:
    y = self.m(y)
return torch.tanh(y)""",
    "parts of one": """
if y.max() > 1:
    a, b = y.chunk(2, -1)
else:
    b, a = y.chunk(2, -1)
return torch.cat([a * 2, b.sin()], -1)""",
    "a number": """
largest = y.abs().max().item()
if largest > 1.0:
    y = y / largest
return self.m(y)""",
    "one of two, in two places": """
large = bool(y.abs().max() > 1)
y = y / 2 if large else y
y = torch.tanh(y)
return self.m(y * 2) if large else y""",
    "what was written to in between": """
large = y.abs().max() > 1
y = y / 2 if large else y
large.logical_not_()
return self.m(y * 2).sin() if large else y""",
    "an end": """
if x.abs().max() > 1:
    return x
return self.m(y)""",
    "something is logged by one": """
if y.max() > 1:
    y = self.m(y)
else:
    if y.min() < -9:
        logging.warning("low")
    y = -y
return torch.tanh(y)""",
    "constants of each": """
if y.max() > 1:
    y = y * torch.tensor([1.0, 2.0, 3.0, 4.0])
elif y.min() < -1:
    y = y + torch.tensor([5.0, 6.0, 7.0, 8.0]) * torch.arange(4)
return torch.tanh(y) * torch.tensor([1.0, 2.0, 3.0, 4.0])""",
    "by all or by none": """
if torch.allclose(y, torch.zeros_like(y)) or not torch.equal(x, x.abs()):
    y = torch.relu(y)
return self.m(y)""",
    "one in another": """
if y.max() > 1:
    if y.mean() < 0:
        logging.warning("%s", f"{y.mean().item():.3f}")
        y = -y
    elif x.min() < 0:
        assert y.isfinite().all(), "of one way"
        y = self.m(y)
return torch.tanh(y)""",
    "attention after it": """
if y.max() > 1:
    y = self.m(y)
q = torch.dropout(torch.tanh(y).to(x.dtype), 0.5, train=False)[:, None, :, None]
return torch.nn.functional.scaled_dot_product_attention(q, q + 1, q)[:, 0, :, 0]""",
    "three": """
if y.max() > 1:
    y = y * 2
if y.min() < -1:
    y = y.clamp(min=-0.9)
z = self.m(y)
return z + y if z.sum() > y.sum() else z""",
}


@pytest.mark.parametrize("body", BOTH.values(), ids=BOTH)
def test_both_ways_are_in_the_programs(
    body: str, exported: Callable[[str], tuple[Bundle, str]]
) -> None:
    bundle, model = exported(body)
    assert any("both ways are in the programs" in note for note in bundle.manifest["notes"])
    module = the_model(bundle, model)
    for x in (SMALL, LARGE, -LARGE, torch.randn(1, 4), torch.zeros(2, 4)):
        held(bundle, module, x)


def test_a_gradient_that_the_way_gone_has_not_is_zero(
    exported: Callable[[str], tuple[Bundle, str]],
) -> None:
    bundle, model = exported(BOTH["a layer"])
    places = bundle.manifest["programs"]["forward"]["both_ways"]
    assert places == ["net.py:12"]
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    rows = {row.tensor for row in report.results if row.program == "gradient"}
    assert "grad/m.weight" in rows


def test_a_way_that_no_case_goes_is_told(exported: Callable[[str], tuple[Bundle, str]]) -> None:
    bundle, model = exported("return torch.nan_to_num(y) if torch.isinf(y).any() else y")
    told = [note for note in bundle.manifest["notes"] if "in every case" in note]
    assert len(told) == 1
    assert "net.py:12 comes to False in every case" in told[0]
    infinite = SMALL.clone()
    infinite[1, 2] = float("inf")
    module = the_model(bundle, model)
    script = torch.jit.load(bundle.folder / "forward.pt")
    torch.testing.assert_close(script(infinite), module(infinite))


def test_what_only_logs_is_left_out(exported: Callable[[str], tuple[Bundle, str]]) -> None:
    body = "if y.max() > 9:\n    logging.warning(f'{y.max()} is large')\nreturn self.m(y)"
    bundle, model = exported(body)
    (note,) = (note for note in bundle.manifest["notes"] if "decides by a value" in note)
    assert note.endswith(
        "net.py:12 decides by a value: it changes nothing that is returned, and is left out"
    )
    operators = {node.op_type for node in onnx.load(bundle.folder / "forward.onnx").graph.node}
    assert not operators & {"If", "ReduceMax", "Greater"}
    held(bundle, the_model(bundle, model), LARGE)


def test_what_only_logs_is_left_out_also_where_code_computes_the_same_again(
    exported: Callable[[str], tuple[Bundle, str]],
) -> None:
    body = """
for _ in range(6):
    part = x[:, 1:3].clone()  # the same each time, and more decisions than may matter
    y = torch.tanh(self.m(torch.cat([part, y[:, :2]], 1)))
    if y.abs().mean() > 9:
        logging.warning(f'{y.mean()} is large')
return torch.cat([y, x[:, 1:3].clone()], 1)"""
    bundle, model = exported(body)
    (note,) = (note for note in bundle.manifest["notes"] if "decides by a value" in note)
    assert note.endswith("is left out (5 times more)")
    held(bundle, the_model(bundle, model), LARGE)


GUARDED = """
for layer in (self.l, self.m):
    y = torch.tanh(layer(y))
    assert (
        not torch.isnan(y).any()
    ), "not a number"
return y"""


class TestErrors:
    @pytest.fixture
    def bundle(self, exported: Callable[[str], tuple[Bundle, str]]) -> Bundle:
        bundle, model = exported(GUARDED)
        held(bundle, the_model(bundle, model), LARGE)
        return bundle

    def test_artifacts_fail_where_the_model_does(self, bundle: Bundle) -> None:
        (note,) = (note for note in bundle.manifest["notes"] if "decides by a value" in note)
        said = "where the model raises AssertionError: not a number, artifacts fail (1 times more)"
        assert note == f"net.py:14 decides by a value: {said}"
        bad = SMALL.clone()
        bad[2, 3] = float("nan")
        session = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
        message = f"{HOLDS} the model does not raise AssertionError: not a number (net.py:14)"
        runs: Mapping[str, Callable[[Tensor], Any]] = {
            "torchscript": torch.jit.load(bundle.folder / "forward.pt"),
            "exported_program": torch.export.load(bundle.folder / "forward.pt2").module(),
            "onnxruntime": lambda x: session.run(None, {"x": x.numpy()}),
        }
        for run in runs.values():
            run(SMALL)
            with pytest.raises(Exception, match=re.escape(message)):
                run(bad)

    def test_no_bug_is_planted_in_what_is_asserted(self, bundle: Bundle) -> None:
        graph = torch.export.load(bundle.folder / "forward.pt2").graph
        apart = checks(graph)
        assert {"aten.isnan.default", "aten.any.default"} <= {str(n.target) for n in apart}
        assert not {"aten.tanh.default", "aten.linear.default"} & {str(n.target) for n in apart}
        model = onnx.load(bundle.folder / "forward.onnx")
        results = [value.name for value in model.graph.output]
        planted = {i for edit in EDITS.values() for (i,) in sites(model.graph.node, results, edit)}
        kinds = {model.graph.node[i].op_type for i in planted}
        assert kinds
        assert not kinds & {"IsNaN", "Cast", "Not", "Gather", "ReduceMax", "Sub", "Mul"}


REFUSED = {
    "many": (
        "for k in range(6):\n    y = y / 2 if y.max() > k else y.sin()\nreturn y",
        "such decisions, more than 4, change what is computed",
    ),
    "sizes": (
        "return y[:, :2] if y.max() > 1 else y[:, :3]",
        "such a decision changes the sizes of what is computed",
    ),
    "what goes wrong by itself": (
        "return y[:, (x[0, 0] < 0).long() * 5 - 5] if x[0, 0] < 0 else y[:, 1]",
        "by one of its ways there is: IndexError",
    ),
    "what cannot be captured": (
        "return y + y.detach().numpy().max() if x[0, 0] < 0 else y",
        "otherwise the forward program cannot be captured",
    ),
}


@pytest.mark.parametrize(("body", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_why(
    body: str, reason: str, exported: Callable[[str], tuple[Bundle, str]]
) -> None:
    with pytest.raises(ExportFailed) as raised:
        exported(body)
    (told,) = (line for line in raised.value.details if "Tensor.__bool__" in line)
    assert re.search(rf"net\.py:1[23]: .*{reason}", told)


ALONE = {
    "what goes wrong by itself": (
        "return y[:, y.argmax() + 4] if y.max() > 90 else y[:, 0]",
        "IndexError: ",
    ),
    "what cannot be captured": (
        "return y + y.detach().numpy().max() if y.max() > 90 else y",
        "the forward program cannot be captured: ",
    ),
    # What comes by the first is needed by the second.
    "asked again": (
        """
large = (y > 90).any().item()
if large:
    rows = [row for row in y if row.detach().numpy().max() > 90]
y = self.m(y).tanh()
return y + torch.stack(rows).mean() if large else y
""",
        "RuntimeError: stack expects a non-empty TensorList",
    ),
}


@pytest.mark.parametrize(("body", "reason"), ALONE.values(), ids=ALONE)
def test_artifacts_go_one_way_alone_where_it_is_always_gone_and_the_other_cannot_be_captured(
    body: str, reason: str, exported: Callable[[str], tuple[Bundle, str]]
) -> None:
    bundle, model = exported(body)
    (note,) = (note for note in bundle.manifest["notes"] if "decides by a value" in note)
    assert re.fullmatch(
        r"net.py:1[23] decides by a value: the way of False is in the programs, artifacts fail "
        rf"where it comes out otherwise, of which no program could be made: {reason}.*",
        note,
    )
    held(bundle, the_model(bundle, model), SMALL)
    session = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    runs: Mapping[str, Callable[[Tensor], Any]] = {
        "torchscript": torch.jit.load(bundle.folder / "forward.pt"),
        "exported_program": torch.export.load(bundle.folder / "forward.pt2").module(),
        "onnxruntime": lambda x: session.run(None, {"x": x.numpy()}),
    }
    for run in runs.values():
        with pytest.raises(Exception, match=rf"{HOLDS} net.py:1[23] comes to False"):
            run(1000 * LARGE)


def test_what_raises_beside_it_is_told_as_such(
    exported: Callable[[str], tuple[Bundle, str]],
) -> None:
    bundle, _ = exported("assert not y.isnan().any()\n" + ALONE["what cannot be captured"][0])
    notes = [note for note in bundle.manifest["notes"] if "decides by a value" in note]
    assert ["artifacts fail where it comes" in note for note in notes] == [False, True]
    assert "where the model raises AssertionError, artifacts fail" in notes[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_program_of_one_way_alone_is_no_program(
    kept: bool,
    exported: Callable[[str], tuple[Bundle, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where joining were wrong, the model that is made to go the other way would tell."""

    def one(name: str, yes: Program, no: Program, others: object) -> Program:
        return yes if kept else no

    monkeypatch.setattr(decisions, "joined", one)
    body = f"return self.m(y) if {'y.max() < 90' if kept else 'y.max() > 90'} else -y"
    with pytest.raises(ExportFailed) as raised:
        exported(body)
    assert "a program gives something else than the model" in "\n".join(raised.value.details)


def test_what_else_blocks_is_told_alone(exported: Callable[[str], tuple[Bundle, str]]) -> None:
    with pytest.raises(ExportFailed) as raised:
        exported("assert y.isfinite().all()\nreturn y * float(y.detach().numpy().max())")
    assert not any("Tensor.__bool__" in line for line in raised.value.details)
    assert any("Tensor.numpy" in line for line in raised.value.details)


CHECKING = {
    "torch.distributions.Normal(self.m(y), 5 + y, True).log_prob(x)": (
        "to satisfy the constraint GreaterThan",
        # The latter from torch 2.15 on, which asserts it itself in a capture.
        r"does not raise ValueError: Expected parameter scale|to satisfy its distribution constr",
    ),
    "torch.nn.functional.gaussian_nll_loss(self.m(y), x, 5 + y, reduction='none')": (
        "var has negative",
        "does not raise ValueError: var has negative",
    ),
}


@pytest.mark.parametrize("call", CHECKING)
def test_what_torchs_functions_check_is_an_error_of_the_artifacts(
    exported: Callable[[str], tuple[Bundle, str]], call: str
) -> None:
    bundle, model = exported(f"return {call}")
    by_model, by_artifact = CHECKING[call]
    module = the_model(bundle, model)
    held(bundle, module, SMALL)
    large = torch.full((1, 4), 1e3)
    bad = torch.cat([large, -large])
    with pytest.raises(ValueError, match=by_model):
        module(bad)
    session = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    for run in (
        lambda: session.run(None, {"x": bad.numpy()}),
        lambda: torch.jit.load(bundle.folder / "forward.pt")(bad),
    ):
        with pytest.raises(Exception, match=by_artifact):
            run()


CHECKED = {
    "a decision": "if y.max() > 1:\n    y = self.m(y)",
    "a loop": "y = torch.stack([self.m(row) for row in y])",
}


@pytest.mark.parametrize("beside", CHECKED)
def test_numbers_of_tensors_may_be_checked(
    exported: Callable[[str], tuple[Bundle, str]], beside: str
) -> None:
    checks = "torch._check_tensor_all(y < 1e4)\ntorch._check(y.max().item() < 1e4)"
    bundle, model = exported(f"{checks}\n{CHECKED[beside]}\nreturn torch.tanh(y)")
    module = the_model(bundle, model)
    for x in (SMALL, LARGE, LARGE.repeat(2, 1)):
        held(bundle, module, x)
