"""The norms are good citizens of torch: fakes, errors, autograd, TorchScript, export."""

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.ops import OPS, register
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated
from fuseport.ops.spec import Case, Inputs, OpSpec

SPECS = {name: OPS[name] for name in ("rms_norm", "rms_norm_gated")}
CASES = [case for spec in SPECS.values() for case in spec.cases]
Run = Callable[..., "subprocess.CompletedProcess[str]"]  # noqa: F821


@pytest.fixture(autouse=True)
def _native() -> None:
    assert set(register(*SPECS).values()) == {"native"}


def overload(name: str) -> "torch._ops.OpOverload":
    return getattr(torch.ops.fuseport, name).default


def case_of(op: str, name: str) -> Case:
    return next(case for case in SPECS[op].cases if case.name == name)


def backward_inputs(spec: OpSpec, case: Case) -> tuple[str, Inputs]:
    """The backward operator of a case, and inputs for it; none requires grad."""
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float32, 1)
    cotangents = {"dout": torch.ones(inputs["x"].shape)}
    assert operator.backward is not None
    return operator.backward, spec.backward_inputs(operator, inputs, cotangents)


# What tracing and dynamic shapes can tell apart; the others differ in sizes and values alone.
OPCHECKED = (
    *("plain", "one_of_everything", "two_dimensions", "four_dimensions", "no_rows", "groups"),
    *("layout_channels_first", "layout_split_projection", "layout_expanded_rows"),
)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in OPCHECKED],
    ids=lambda c: f"{c.operator}-{c.name}",
)
def test_opcheck(case: Case) -> None:
    inputs = [
        x.requires_grad_() if isinstance(x, Tensor) else x
        for x in case.make(torch.float32, 0).values()
    ]
    torch.library.opcheck(overload(case.operator), tuple(inputs))
    name, gradient_inputs = backward_inputs(SPECS[case.operator], case)
    torch.library.opcheck(overload(name), tuple(gradient_inputs.values()))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.operator}-{c.name}")
def test_fake_has_the_strides_of_the_kernel_and_of_the_reference(case: Case) -> None:
    spec = SPECS[case.operator]
    inputs = case.make(torch.float32, 0)
    name, gradient_inputs = backward_inputs(spec, case)
    for operator, x in (
        (spec.operator(case.operator), inputs),
        (spec.operator(name), gradient_inputs),
    ):
        with FakeTensorMode() as mode:
            fake_inputs = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in x.values()]
            fakes = operator(*fake_inputs)
        for fake, real, plain in zip(
            fakes, operator(*x.values()), operator.reference(*x.values()), strict=True
        ):
            assert fake.shape == real.shape == plain.shape
            assert fake.stride() == real.stride() == plain.stride()
            assert fake.dtype == real.dtype == plain.dtype


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_native_schemas_are_those_of_the_spec(spec: OpSpec) -> None:
    for operator in spec.operators:
        declared = str(overload(operator.name)._schema)
        assert declared == operator.qualified_name + operator.schema


@pytest.mark.parametrize("grad_mode", [True, False])
def test_what_only_the_backward_needs_has_no_gradient(grad_mode: bool) -> None:
    x, weight = torch.randn(2, 8), torch.ones(8, requires_grad=True)
    with torch.set_grad_enabled(grad_mode):
        out, rstd = overload("rms_norm")(x, weight, 1e-5, 8)
    assert out.requires_grad == grad_mode
    assert not rstd.requires_grad


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients_of_gradients_are_refused(spec: OpSpec) -> None:
    inputs = case_of(spec.name, "plain").make(torch.float64, 0)
    x = inputs["x"].requires_grad_()
    out, _ = spec.operator(spec.name)(*inputs.values())
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"derivative for fuseport::{spec.name}_backward"):
        torch.autograd.grad(dx.sum(), x)


# What is wrong, and how to make it of good inputs of the gated operator.
BAD: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "x is 0-D": lambda x: {"x": x["x"][0, 0, 0]},
    "x is of integers": lambda x: {"x": x["x"].long()},
    "x is complex": lambda x: {"x": x["x"].to(torch.complex64)},
    "z is float64": lambda x: {"z": x["z"].double()},
    "z is shorter": lambda x: {"z": x["z"][:, 1:]},
    "z has fewer dimensions": lambda x: {"z": x["z"][0]},
    "z is on another device": lambda x: {"z": x["z"].to("meta")},
    "weight is float64": lambda x: {"weight": x["weight"].double()},
    "weight is half": lambda x: {"weight": x["weight"].half()},
    "weight is 2-D": lambda x: {"weight": x["weight"][None]},
    "weight is 0-D": lambda x: {"weight": x["weight"][0]},
    "weight is longer": lambda x: {"weight": torch.cat([x["weight"]] * 2)},
    "weight is on another device": lambda x: {"weight": x["weight"].to("meta")},
    "eps is negative": lambda x: {"eps": -1.0},
    "eps is a small negative number": lambda x: {"eps": -2.5e-7},
    "eps is NaN": lambda x: {"eps": float("nan")},
    "eps is infinite": lambda x: {"eps": float("inf")},
    "group_size does not divide": lambda x: {"group_size": 5},
    "group_size is too large": lambda x: {"group_size": 24},
    "group_size is 0": lambda x: {"group_size": 0},
    "group_size is negative": lambda x: {"group_size": -4},
}
BAD_GRADIENTS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "dout is shorter": lambda x: {"dout": x["dout"][..., 1:]},
    "dout is float64": lambda x: {"dout": x["dout"].double()},
    "rstd has too many groups": lambda x: {"rstd": torch.cat([x["rstd"]] * 2, -1)},
    "rstd is float64": lambda x: {"rstd": x["rstd"].double()},
    "group_size is 0 in backward": lambda x: {"group_size": 0},
}


def message(run: Callable[..., object], inputs: Inputs) -> str:
    with pytest.raises(ValueError, match=r"fuseport::\w+: \w+ must be .*; got ") as caught:
        run(*inputs.values())
    return str(caught.value)


@pytest.mark.parametrize("what", [*BAD, *BAD_GRADIENTS])
@pytest.mark.parametrize("op", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(
    op: str, what: str, dtype: torch.dtype
) -> None:
    spec, case = SPECS[op], case_of(op, "groups")
    if what in BAD:
        name, good, change = op, case.make(dtype, 0), BAD[what]
    else:
        if dtype != torch.float32:
            return
        name, good = backward_inputs(spec, case)
        change = BAD_GRADIENTS[what]
    if op == "rms_norm" and what.startswith("z "):
        return
    inputs = {**good, **change(good)}
    operator = spec.operator(name)
    expected = message(operator.reference, inputs)
    (changed,) = change(good)
    assert expected.startswith(f"fuseport::{name}: {changed} must be ")
    assert message(operator, inputs) == expected
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        assert message(operator, fakes) == expected


class Block(torch.nn.Module):
    """Both norms, with parameters of its own."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, d))
        self.project = torch.nn.Linear(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.project(rms_norm(x, self.weight)).chunk(2, -1)
        return rms_norm_gated(y, z, self.weight, 1e-5, 4, False)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_batch_and_length_open(strict: bool) -> None:
    model = Block()
    dims = {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("l", min=1)}
    x = torch.randn(2, 9, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,), strict=strict)
    ranges = list(program.range_constraints.values())
    assert len(ranges) == 2
    for values in ranges:
        assert int(values.lower) <= 1
        assert values.upper > 10**6
    found = [str(n.target) for n in program.graph.nodes if "fuseport" in str(n.target)]
    assert found == ["fuseport.rms_norm.default", "fuseport.rms_norm_gated.default"]
    for b, l in ((1, 1), (3, 65)):  # noqa: E741
        x = torch.randn(b, l, 8)
        torch.testing.assert_close(program.module()(x), model(x))


def test_compiled_with_dynamic_shapes_gives_the_same_gradients() -> None:
    model = Block()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for b, l in ((2, 9), (3, 70)):  # noqa: E741
        x = torch.randn(b, l, 8, requires_grad=True)
        cotangent = torch.randn(b, 8, l).mT
        wanted = [x, *model.parameters()]
        got = torch.autograd.grad(compiled(x), wanted, cotangent)
        expected = torch.autograd.grad(model(x), wanted, cotangent)
        torch.testing.assert_close(got, expected)


def test_torchscript_keeps_the_operators_and_their_gradients() -> None:
    class Norms(torch.nn.Module):
        def forward(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
            y = torch.ops.fuseport.rms_norm(x, weight, 1e-5, 4)[0]
            return torch.ops.fuseport.rms_norm_gated(y, z, weight, 1e-5, 12, True)[0]

    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(Norms()), saved)
    saved.seek(0)
    loaded = torch.jit.load(saved)
    for shape in ((2, 3, 12), (7, 12), (2, 3, 12)):
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
        inputs.append(torch.randn(12, requires_grad=True))
        out, expected = loaded(*inputs), Norms()(*inputs)
        assert torch.equal(out, expected)
        got = torch.autograd.grad(out.sin().sum(), inputs)
        for a, b in zip(got, torch.autograd.grad(expected.sin().sum(), inputs), strict=True):
            assert torch.equal(a, b)


FALLBACK = """
import json, torch
from torch import Tensor
from fuseport.ops import OPS, register
found = {}
for op in ("rms_norm", "rms_norm_gated"):
    assert register(op) == {op: "reference"}
    spec = OPS[op]
    schemas = {o.name: str(getattr(torch.ops.fuseport, o.name).default._schema)
               for o in spec.operators}
    gradients = {}
    for case in spec.cases:
        if case.name not in {"plain", "groups_gate_before_norm", "layout_channels_first"}:
            continue
        inputs = list(case.make(torch.float64, 0).values())
        tensors = [x.requires_grad_() for x in inputs if isinstance(x, Tensor)]
        torch.library.opcheck(getattr(torch.ops.fuseport, op).default, tuple(inputs))
        out, rstd = spec.operator(op)(*inputs)
        assert not rstd.requires_grad
        found_here = torch.autograd.grad(out.sin().sum(), tensors)
        gradients[case.name] = [g.tolist() for g in found_here]
    found[op] = [schemas, gradients]
print(json.dumps(found))
"""


def test_fallback_has_the_schemas_and_gradients_of_the_native_library(run_python: Run) -> None:
    done = run_python(FALLBACK, FUSEPORT_NATIVE="0")
    assert done.returncode == 0, done.stderr
    for op, (schemas, found) in json.loads(done.stdout).items():
        spec = SPECS[op]
        for operator in spec.operators:
            assert schemas[operator.name] == str(overload(operator.name)._schema)
        assert found
        for name, gradients in found.items():
            inputs = list(case_of(op, name).make(torch.float64, 0).values())
            tensors = [x.requires_grad_() for x in inputs if isinstance(x, Tensor)]
            out, _ = spec.operator(op)(*inputs)
            expected = torch.autograd.grad(out.sin().sum(), tensors)
            for got, wanted in zip(gradients, expected, strict=True):
                torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted)


LESSER_ISA = """
import torch
from fuseport.ops import OPS, register
worst = 0.0
for op in ("rms_norm", "rms_norm_gated"):
    assert register(op) == {op: "native"}
    spec = OPS[op]
    for case in spec.cases:
        for dtype in (torch.float32, torch.float64):
            inputs = case.make(dtype, 0)
            operator = spec.operator(case.operator)
            outputs = operator.reference(*inputs.values())
            gradient = spec.operator(operator.backward)
            cotangents = {"dout": outputs[0].sin()}
            saved = spec.backward_inputs(operator, inputs, cotangents).values()
            pairs = [*zip(operator(*inputs.values()), outputs)]
            pairs += [*zip(gradient(*saved), gradient.reference(*saved))]
            for got, wanted in pairs:
                if wanted.numel():
                    scale = wanted.abs().max().clamp(min=1)
                    error = (got - wanted).abs().max() / scale / torch.finfo(dtype).eps
                    worst = max(worst, float(error)) if error == error else float("inf")
print(worst)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(isa: str, run_python: Run) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 50, "ulps of a tensor's scale"


def test_python_and_native_say_the_same_of_weights_of_half_types() -> None:
    x, weight = torch.zeros(2, 3).half(), torch.zeros(3).bfloat16()
    with pytest.raises(ValueError, match=re.escape("weight must be float16 or float32; got")):
        rms_norm(x, weight)
