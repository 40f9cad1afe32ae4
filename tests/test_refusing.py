"""Artifacts refuse sizes for which their program does not hold, in every format."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import sympy
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv, Max, Mod, ModularIndexing, TruncToInt

from fuseport.exporter import api, formats
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.refusing import HOLDS, checks
from fuseport.exporter.program.sizes._arithmetic import Unknown, computed, fails, holds, of_integers
from fuseport.exporter.verify.mutants.onnx_edits import EDITS, sites
from fuseport.tests.test_program import SEQUENCE, SIZES, inputs_of

# Length is a multiple of 4, and another way is taken from 100 on; widths are compared.
NET = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.places = torch.nn.Parameter(torch.ones(1, 200, 8))

    def forward(self, x, y):
        length = x.shape[1]
        missing = -length % 4
        z = self.up(F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, 4))).cumsum(2).flatten(1, 2)
        z = z + self.places[:, :length + missing] if y.shape[1] > 3 else z
        return (z[:, :length] if missing else z) * y.sum(1, keepdim=True)
"""
REFUSED = "the program holds only where width >= 4 and length is a multiple of 4"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("refusing")
    file = folder / "net.py"
    file.write_text(NET)
    state = {"up.weight": torch.randn(8, 8), "up.bias": torch.randn(8)}
    torch.save({**state, "places": torch.randn(1, 200, 8)}, folder / "w.pth")
    return api.export(
        folder / "w.pth",
        folder / "bundle",
        model=f"{file}:Net",
        inputs=parse_inputs(["x:[batch,length,8]", "y:[batch,width,8]"]),
        format=["onnx", "exported_program", "torchscript", "aot_inductor"],
    )


def _exported_program(file: Path) -> Callable[..., Any]:
    return torch.export.load(file).module()


def _onnx(file: Path) -> Callable[..., Any]:
    session = onnxruntime.InferenceSession(file)
    names = [value.name for value in session.get_inputs()]
    return lambda *given: session.run(
        None, {name: t.numpy() for name, t in zip(names, given, strict=True)}
    )


def _reference(file: Path) -> Callable[..., Any]:
    evaluator = ReferenceEvaluator(onnx.load(file))
    return lambda *given: evaluator.run(
        None, {name: t.numpy() for name, t in zip(evaluator.input_names, given, strict=True)}
    )


WAYS: Mapping[str, tuple[str, Callable[[Path], Callable[..., Any]], str]] = {
    "torchscript": (".pt", torch.jit.load, REFUSED),
    # Or torch compares the cotangent's size with the output's first.
    "exported_program": (".pt2", _exported_program, f"{REFUSED}|to be equal to"),
    "onnxruntime": (".onnx", _onnx, REFUSED),
    "onnx_reference": (".onnx", _reference, "out of bounds"),
    "aot_inductor": (".aoti.pt2", torch._inductor.aoti_load_package, "to be True"),
}


@pytest.mark.parametrize("program", ["forward", "gradient"])
@pytest.mark.parametrize("way", WAYS)
def test_sizes_that_a_program_does_not_hold_for_are_refused(
    way: str, program: str, bundle: Bundle
) -> None:
    suffix, opened, said = WAYS[way]
    run = opened(bundle.folder / f"{program}{suffix}")

    def given(length: int) -> list[Tensor]:
        x, y = torch.randn(3, length, 8), torch.randn(3, 5, 8)
        return [x, y] if program == "forward" else [x, y, torch.randn(3, length, 8)]

    for length in (4, 8, 40, 200):
        run(*given(length))
    for length in (6, 41, 204):
        with pytest.raises(Exception, match=said):
            run(*given(length))


def test_what_is_refused_is_said_and_what_is_not_passes(bundle: Bundle) -> None:
    facts = bundle.manifest["programs"]["forward"]
    assert facts["conditions"] == [
        "width >= 4",
        "length is a multiple of 4 and <= 200",
    ]
    report = api.verify(bundle.folder, model=f"{bundle.folder.parent / 'net.py'}:Net")
    assert report.exit_code() == 0, report.failures()


@pytest.mark.parametrize("way", ["torchscript", "exported_program", "onnxruntime"])
def test_quotients_below_zero_are_rounded_down(way: str, tmp_path: Path) -> None:
    """As Python and sympy do; ONNX's division rounds towards zero."""
    suffix, opened, _ = WAYS[way]
    length = sympy.Symbol("length", integer=True, positive=True)
    forward = capture_forward(torch.nn.Tanh(), inputs_of(SEQUENCE, SIZES), SEQUENCE)
    program = replace(forward, requires=(FloorDiv(length - 9, 4) > -2,))
    file = tmp_path / f"forward{suffix}"
    formats.get(formats.of_file(file.name)).write(program, file, formats.Options(file))
    run = opened(file)
    run(*inputs_of(SEQUENCE, {"batch": 1, "length": 5}).values())
    with pytest.raises(Exception, match=HOLDS):
        run(*inputs_of(SEQUENCE, {"batch": 1, "length": 4}).values())


def test_no_bug_is_planted_in_what_checks_sizes(bundle: Bundle) -> None:
    """It would be seen at no size that is compared."""
    model = onnx.load(bundle.folder / "forward.onnx")
    results = [value.name for value in model.graph.output]
    of_checks = [i for i, node in enumerate(model.graph.node) if node.name.startswith(HOLDS)]
    assert len(of_checks) > 9
    for edit in EDITS.values():
        found = {site[0] for site in sites(model.graph.node, results, edit)}
        assert found.isdisjoint(of_checks)
    graph = torch.export.load(bundle.folder / "forward.pt2").graph
    found = {str(node.target) for node in checks(graph)}
    assert {"aten._assert_scalar.default", "aten.sym_size.int"} <= found
    assert {str(node.target) for node in graph.nodes if node not in checks(graph)}.isdisjoint(
        {"aten._assert_scalar.default"}
    )


def test_expressions_are_computed_as_sympy_does() -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)
    for expression in (
        n * m + 3 * n - 7,
        FloorDiv(n - 5, 3),
        Mod(n, 4) + Max(n, m),
        ModularIndexing(n, 3, 5) + n**3,
        sympy.Min(n, 7) - m,
    ):
        for a in range(1, 12):
            values = {n: a, m: 5}
            wanted = expression.xreplace({k: sympy.Integer(v) for k, v in values.items()})
            found = computed(expression, values, int, lambda step, x, y: step(x, y))
            assert found == wanted
            for relation in (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge):
                condition = relation(expression, 9)
                if condition not in (sympy.true, sympy.false):
                    assert holds(condition, values) == relation(wanted, 9)
                    assert fails(condition, values) != relation(wanted, 9)
                    known = condition.xreplace({n: sympy.Integer(a)})  # as far as it is, of one
                    assert fails(condition, {n: a}) == (known == sympy.false)


def test_what_is_more_than_integers_is_known_but_not_checked() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    half = sympy.Eq(TruncToInt(IntTrueDiv(n, 2)), 4)
    assert not of_integers(half)
    assert holds(half, {n: 9})
    assert not holds(half, {n: 10})
    with pytest.raises(Unknown):
        computed(half, {n: 9}, int, operator.add)  # type: ignore[arg-type]
    assert of_integers(sympy.Eq(FloorDiv(n, 2), 4))


def test_an_unchecked_size_is_told(tmp_path: Path) -> None:
    """What floating numbers decide, no artifact checks."""
    file = tmp_path / "net.py"
    file.write_text(NET.replace("y.shape[1] > 3", "y.shape[1] ** 0.5 > 2"))
    state = {"up.weight": torch.randn(8, 8), "up.bias": torch.randn(8)}
    torch.save({**state, "places": torch.randn(1, 200, 8)}, tmp_path / "w.pth")
    bundle = api.export(
        tmp_path / "w.pth",
        tmp_path / "bundle",
        model=f"{file}:Net",
        inputs=parse_inputs(["x:[batch,length,8]", "y:[batch,width,8]"]),
        format="torchscript",
        programs="forward",
    )
    assert bundle.manifest["programs"]["forward"]["unchecked"] == ["width >= 5"]
    module = torch.jit.load(bundle.folder / "forward.pt")
    assert module(torch.randn(1, 8, 8), torch.randn(1, 2, 8)).shape == (1, 8, 8)
    assert np.isfinite(module(torch.randn(1, 8, 8), torch.randn(1, 6, 8)).detach()).all()


def test_a_condition_that_divides_by_a_size_of_zero_does_not_hold() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    condition = sympy.Eq(Mod(sympy.Symbol("m", integer=True, positive=True), FloorDiv(n, 4)), 0)
    sizes = dict.fromkeys(condition.free_symbols, 3)
    assert fails(condition, sizes)
    assert not holds(condition, sizes)
    assert of_integers(condition)
    assert not fails(condition, {n: 8})
