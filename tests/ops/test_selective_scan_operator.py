"""The selective scan is a good citizen of torch: fakes, errors, autograd, TorchScript, export."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.ops import OPS
from fuseport.ops.selective_scan import selective_scan, shapes
from fuseport.ops.selective_scan.cases import CASES
from fuseport.ops.spec import Case, Inputs, OpSpec

CASE = {case.name: case for case in CASES}
Run = Callable[..., "subprocess.CompletedProcess[str]"]  # noqa: F821


def overload(name: str) -> "torch._ops.OpOverload":
    return getattr(torch.ops.fuseport, name).default


def backward_inputs(spec: OpSpec, case: Case, dtype: torch.dtype) -> tuple[str, Inputs]:
    """The backward operator of a case, and inputs for it; none requires grad."""
    operator = spec.operator(case.operator)
    inputs = case.make(dtype, 1)
    out, last_state, _ = operator.fake(*inputs.values())
    cotangents = {"dout": torch.ones_like(out), "dlast_state": torch.ones_like(last_state)}
    assert operator.backward is not None
    return operator.backward, spec.backward_inputs(operator, inputs, cotangents)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.bfloat16) for case in CASES if case.name.startswith("layout")),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_opcheck(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    inputs = [
        x.requires_grad_() if isinstance(x, Tensor) else x for x in case.make(dtype, 0).values()
    ]
    torch.library.opcheck(overload(case.operator), tuple(inputs))
    name, gradient_inputs = backward_inputs(spec, case, dtype)
    torch.library.opcheck(overload(name), tuple(gradient_inputs.values()))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_fake_has_the_strides_of_the_kernel_and_of_the_reference(spec: OpSpec, case: Case) -> None:
    inputs = case.make(torch.float32, 0)
    name, gradient_inputs = backward_inputs(spec, case, torch.float32)
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


def test_native_schemas_are_those_of_the_spec(spec: OpSpec) -> None:
    for operator in spec.operators:
        declared = str(overload(operator.name)._schema)
        assert declared == operator.qualified_name + operator.schema


def test_python_and_native_agree_on_the_chunk() -> None:
    header = (OPS["selective_scan"].folder / "kernel.hpp").read_text()
    (chunk,) = re.findall(r"CHUNK = (\d+);", header)
    assert int(chunk) == shapes.CHUNK


@pytest.mark.parametrize("name", ["selective_scan", "selective_scan_gated"])
def test_gradients_of_gradients_are_refused(spec: OpSpec, name: str) -> None:
    case = CASE["gated" if name.endswith("gated") else "plain"]
    inputs = case.make(torch.float64, 0)
    u = inputs["u"].requires_grad_()
    out, *_ = spec.operator(name)(*inputs.values())
    (du,) = torch.autograd.grad(out.sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"derivative for fuseport::{name}_backward"):
        torch.autograd.grad(du.sum(), u)


# What is wrong, and how to make it of good inputs of the gated operator.
BAD: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "u is 2-D": lambda x: {"u": x["u"][0]},
    "u is of integers": lambda x: {"u": x["u"].long()},
    "delta is longer": lambda x: {"delta": torch.cat([x["delta"], x["delta"]], 2)},
    "delta is 2-D": lambda x: {"delta": x["delta"][0]},
    "delta is float64": lambda x: {"delta": x["delta"].double()},
    "A is 1-D": lambda x: {"A": x["A"][0]},
    "A has other channels": lambda x: {"A": x["A"][1:]},
    "A is half": lambda x: {"A": x["A"].half()},
    "A is complex128": lambda x: {"A": x["A"].to(torch.complex128)},
    "B is 1-D": lambda x: {"B": x["B"][0, 0, 0]},
    "B has other states": lambda x: {"B": x["B"][:, :, 1:]},
    "B has another batch": lambda x: {"B": x["B"][:1]},
    "B has 4 groups": lambda x: {"B": x["B"].expand(-1, 4, -1, -1)},
    "B has no groups": lambda x: {"B": x["B"][:, :0]},
    "B is 2-D and of another shape": lambda x: {"B": x["B"][0, 0]},
    "B is 3-D and of another shape": lambda x: {"B": x["B"][0]},
    "C is of integers": lambda x: {"C": x["C"].int()},
    "C is shorter": lambda x: {"C": x["C"][..., 1:]},
    "D is 2-D": lambda x: {"D": x["D"][None]},
    "D is float64": lambda x: {"D": x["D"].double()},
    "z is shorter": lambda x: {"z": x["z"][..., 1:]},
    "z is half": lambda x: {"z": x["z"].half()},
    "bias is longer": lambda x: {"delta_bias": torch.cat([x["delta_bias"]] * 2)},
    "bias is bool": lambda x: {"delta_bias": x["delta_bias"] > 0},
    "B is on another device": lambda x: {"B": x["B"].to("meta")},
    "bias is on another device": lambda x: {"delta_bias": x["delta_bias"].to("meta")},
}
# The same with complex A.
BAD_COMPLEX: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "complex A is 1-D": lambda x: {"A": x["A"][0]},
    "B has one number for each step": lambda x: {"B": x["B"][..., ::2]},
    "B of three dimensions has one": lambda x: {"B": x["B"][:, 0, :, ::2]},
    "B has too many dimensions": lambda x: {"B": x["B"][None]},
    "B is constant and real": lambda x: {"B": x["A"].real},
    "B is constant and complex128": lambda x: {"B": x["A"].to(torch.complex128)},
    "C varies and is complex": lambda x: {"C": torch.complex(x["C"], x["C"])},
    "D is complex": lambda x: {"D": x["D"].to(torch.complex64)},
    "bias is complex": lambda x: {"delta_bias": x["delta_bias"].to(torch.complex64)},
}
BAD_GRADIENTS: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "dout is shorter": lambda x: {"dout": x["dout"][..., 1:]},
    "dout is float64": lambda x: {"dout": x["dout"].double()},
    "dlast_state is 2-D": lambda x: {"dlast_state": x["dlast_state"][0]},
    "chunk_states has too many": lambda x: {"chunk_states": torch.cat([x["chunk_states"]] * 2, 1)},
    "u is 2-D in backward": lambda x: {"u": x["u"][0]},
}


def message(run: Callable[..., object], inputs: Inputs) -> str:
    with pytest.raises(ValueError, match=r"fuseport::\w+: \w+ must be .*; got ") as caught:
        run(*inputs.values())
    return str(caught.value)


@pytest.mark.parametrize("what", [*BAD, *BAD_COMPLEX, *BAD_GRADIENTS])
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(spec: OpSpec, what: str) -> None:
    name = "selective_scan_gated"
    if what in BAD:
        good, change = CASE["gated"].make(torch.float32, 0), BAD[what]
    elif what in BAD_COMPLEX:
        good, change = CASE["complex_gated"].make(torch.float32, 0), BAD_COMPLEX[what]
    else:
        name, good = backward_inputs(spec, CASE["gated"], torch.float32)
        change = BAD_GRADIENTS[what]
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
    """A scan whose parameters are its own, for a channels-last input."""

    def __init__(self, d: int = 6, n: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.A_log = torch.nn.Parameter(torch.rand(d, n, generator=generator))
        self.D = torch.nn.Parameter(torch.rand(d, generator=generator))
        self.project = torch.nn.Linear(d, 2 * d + 2 * n)
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        d = x.shape[2]
        parts = self.project(x).transpose(1, 2).split([d, d, self.n, self.n], dim=1)
        A = -self.A_log.exp()
        return selective_scan(
            x.transpose(1, 2), parts[0], A, *parts[2:], self.D, parts[1], None, True
        )


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_batch_and_length_open(spec: OpSpec, strict: bool) -> None:
    model = Block()
    dims = {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("l", min=1)}
    x = torch.randn(2, 9, 6)
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,), strict=strict)
    ranges = list(program.range_constraints.values())
    assert len(ranges) == 2
    for values in ranges:
        assert int(values.lower) <= 1
        assert values.upper > 10**6
    scans = [n for n in program.graph.nodes if "selective_scan_gated" in str(n.target)]
    assert len(scans) == 1
    for b, l in ((1, 1), (1, 64), (3, 65), (2, 200)):  # noqa: E741
        x = torch.randn(b, l, 6)
        torch.testing.assert_close(program.module()(x), model(x))


def test_compiled_with_dynamic_shapes_gives_the_same_gradients(spec: OpSpec) -> None:
    model = Block()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for b, l in ((2, 9), (3, 70)):  # noqa: E741
        x = torch.randn(b, l, 6, requires_grad=True)
        cotangent = torch.randn(b, 6, l)
        wanted = [x, *model.parameters()]
        got = torch.autograd.grad(compiled(x), wanted, cotangent)
        expected = torch.autograd.grad(model(x), wanted, cotangent)
        torch.testing.assert_close(got, expected)


def test_torchscript_keeps_the_operator_and_its_gradients(spec: OpSpec) -> None:
    class Scan(torch.nn.Module):
        def forward(
            self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor
        ) -> Tensor:
            return torch.ops.fuseport.selective_scan(u, delta, A, B, C, D, bias, True)[0]

    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(Scan()), saved)
    saved.seek(0)
    loaded = torch.jit.load(saved)
    for name in ("plain", "chunks_3_minus_1", "complex", "plain"):
        x = CASE[name].make(torch.float64, 0)
        x.pop("z", None)
        inputs = [v.requires_grad_() for v in x.values() if isinstance(v, Tensor)]
        out, expected = loaded(*inputs), spec.operator("selective_scan")(*inputs, True)[0]
        assert torch.equal(out, expected)
        cotangent = torch.randn_like(out)
        for got, wanted in zip(
            torch.autograd.grad(out, inputs, cotangent),
            torch.autograd.grad(expected, inputs, cotangent),
            strict=True,
        ):
            assert torch.equal(got, wanted)


FALLBACK = """
import json, sys, torch
from torch import Tensor
from fuseport.ops import OPS, register
assert register() == {name: "reference" for name in OPS}
spec = OPS["selective_scan"]
found = {"schemas": {}, "gradients": {}}
for operator in spec.operators:
    overload = getattr(torch.ops.fuseport, operator.name).default
    found["schemas"][operator.name] = str(overload._schema)
for case in spec.cases:
    if case.name not in {
        "plain", "gated", "groups_differ", "2d_B", "layout_channels_last", "complex_gated"
    }:
        continue
    inputs = list(case.make(torch.float64, 0).values())
    tensors = [x.requires_grad_() for x in inputs if isinstance(x, Tensor)]
    torch.library.opcheck(getattr(torch.ops.fuseport, case.operator).default, tuple(inputs))
    out, last, saved = spec.operator(case.operator)(*inputs)
    assert not saved.requires_grad
    loss = out.sin().sum() + last.cos().sum().real
    gradients = torch.autograd.grad(loss, tensors, create_graph=True)
    found["gradients"][case.name] = [torch.view_as_real(g + 0j).tolist() for g in gradients]
    try:
        torch.autograd.grad(gradients[0].sum(), tensors[0])
    except RuntimeError as error:
        found["refusal"] = str(error)
print(json.dumps(found))
"""


def test_fallback_has_the_schemas_gradients_and_refusal_of_the_native_library(
    spec: OpSpec, run_python: Run
) -> None:
    done = run_python(FALLBACK, FUSEPORT_NATIVE="0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for operator in spec.operators:
        assert found["schemas"][operator.name] == str(overload(operator.name)._schema)
    for name, gradients in found["gradients"].items():
        inputs = list(CASE[name].make(torch.float64, 0).values())
        tensors = [x.requires_grad_() for x in inputs if isinstance(x, Tensor)]
        out, last, _ = spec.operator(CASE[name].operator)(*inputs)
        expected = torch.autograd.grad(out.sin().sum() + last.cos().sum().real, tensors)
        for got, wanted in zip(gradients, expected, strict=True):
            pairs = torch.view_as_real(wanted + 0j)
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), pairs)
    assert re.match(r"derivative for fuseport::\w+_backward is not implemented", found["refusal"])


LESSER_ISA = """
import sys, torch
from fuseport.ops import OPS, register
assert register()["selective_scan"] == "native"
spec = OPS["selective_scan"]
worst = 0.0
for case in spec.cases:
    for dtype in (torch.float32, torch.float64):
        inputs = case.make(dtype, 0)
        operator = spec.operator(case.operator)
        outputs = operator.reference(*inputs.values())
        cotangents = {"dout": torch.ones_like(outputs[0]), "dlast_state": outputs[1].sin()}
        gradient = spec.operator(operator.backward)
        saved = spec.backward_inputs(operator, inputs, cotangents).values()
        pairs = [*zip(operator(*inputs.values()), outputs)]
        pairs += [*zip(gradient(*saved), gradient.reference(*saved))]
        for got, wanted in pairs:
            if wanted.numel():
                scale = wanted.abs().max() + 1e-3
                error = (got - wanted).abs().max() / scale / torch.finfo(dtype).eps
                worst = max(worst, float(error)) if error == error else float("inf")
print(worst)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(spec: OpSpec, isa: str, run_python: Run) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200, "ulps of a tensor's scale"


def test_import_compiles_nothing_and_needs_no_onnx(run_python: Run, tmp_path: Path) -> None:
    code = """
import sys, fuseport.ops
from fuseport.ops import OPS, registration
assert registration.implementation(OPS["selective_scan"]) is None
assert not {"onnx", "onnxscript", "onnxruntime", "ops"} & set(sys.modules)
"""
    done = run_python(code, FUSEPORT_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


NAN_OF_ANOTHER_KIND = """
import torch
from fuseport.ops import register
from fuseport.ops.selective_scan import selective_scan
assert register()["selective_scan"] == "native"
for dtype, bits, whole in (
    (torch.float32, 0x7FC00001, torch.int32),
    (torch.float64, 0x7FF8000020000000 + 1, torch.int64),
):
    odd = torch.tensor(bits, dtype=whole).view(dtype)
    for place in ("delta", "A"):
        ones = torch.ones(1, 2, 3, dtype=dtype)
        given = {"delta": ones.clone(), "A": -torch.ones(2, 2, dtype=dtype)}
        given[place][(0, 1, 1) if place == "delta" else (1, 0)] = odd
        out = selective_scan(ones, given["delta"], given["A"], ones, ones)
        first = 1 if place == "delta" else 0
        assert not out[0, 0].isnan().any(), (dtype, place)
        assert out[0, 1, first:].isnan().all(), (dtype, place, out)
print("NaN stays")
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_nan_stays_whatever_its_payload(isa: str, run_python: Run) -> None:
    done = run_python(NAN_OF_ANOTHER_KIND, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "NaN stays"


STEPS_OF_ABOUT_ONE_LENGTH = """
import torch
from fuseport.ops import register
from fuseport.ops.selective_scan import selective_scan
assert register()["selective_scan"] == "native"
channels, length = 64, 1024
generator = torch.Generator().manual_seed(1)
delta = torch.rand(channels, 1, generator=generator) * 0.02 + 1e-4
delta = delta * (1 + 0.2 * torch.randn(1, channels, length, generator=generator)).clamp_min(0.01)
A = -torch.arange(1, 17.0).expand(channels, 16) / 2
u = torch.zeros(1, channels, length)
u[..., 0] = 1
one = torch.ones(1, 16, length)
decayed = torch.exp(A.double() * delta[0, :, 1:].double().sum(1, keepdim=True))
known = delta[0, :, :1].double() * decayed
for given in ((u, delta), (u.mT.contiguous().mT, delta.mT.contiguous().mT)):
    _, last = selective_scan(*given, A.contiguous(), one, one, return_last_state=True)
    print(float((last[0] / known - 1)[known > 1e-30].square().mean().sqrt()) / length)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_errors_of_decays_do_not_add_up(isa: str, run_python: Run) -> None:
    """Time may be last in memory, where decays come from tables, or channels may."""
    done = run_python(STEPS_OF_ABOUT_ONE_LENGTH, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr
    of_time, of_channels = map(float, done.stdout.split())
    assert of_time < 3e-9, "a step, relative to a state; half an ulp is up to 6e-8"
    assert of_channels < 1.5e-8
