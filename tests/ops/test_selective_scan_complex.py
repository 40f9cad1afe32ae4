"""The selective scan with complex A, beyond the cases that all its tests share."""

import cmath
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseport.exporter import formats
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.ops.selective_scan import reference, selective_scan
from fuseport.ops.selective_scan.cases import CASES
from fuseport.ops.spec import Case, Inputs, OpSpec

CASE = {case.name: case for case in CASES if case.name.startswith("complex")}
Run = Callable[..., "subprocess.CompletedProcess[str]"]  # noqa: F821


def on_each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASE[n] for n in names], ids=lambda c: c.name)


def coefficient(
    t: Tensor, batch: int, channel: int, channels: int, state: int, step: int
) -> complex:
    """B or C of one state at one step, whatever form it comes in."""
    if t.dim() == 2:
        return complex(t[channel, state].item())
    if t.dim() == 3:
        t = t[:, None]
    group = channel // (channels // t.shape[1])
    real, imaginary = t[batch, group, state, 2 * step : 2 * step + 2].tolist()
    return complex(real, imaginary)


def by_definition(x: Inputs) -> tuple[Tensor, Tensor]:
    """out and last_state of float64 inputs, number by number."""
    u, delta, A, B, C = x["u"], x["delta"], x["A"], x["B"], x["C"]
    (b, d, l), N = u.shape, A.shape[1]  # noqa: E741
    out, last = torch.empty_like(u), torch.empty(b, d, N, dtype=A.dtype)
    for i in range(b):
        for j in range(d):
            h = [0j] * N
            for t in range(l):
                step = float(delta[i, j, t] + x["delta_bias"][j])
                if x["delta_softplus"] and step <= 20:
                    step = math.log1p(math.exp(step))
                now, y = float(u[i, j, t]), float(x["D"][j] * u[i, j, t])
                for n in range(N):
                    h[n] *= cmath.exp(step * complex(A[j, n].item()))
                    h[n] += step * now * coefficient(B, i, j, d, n, t)
                    y += 2 * (coefficient(C, i, j, d, n, t) * h[n]).real
                if "z" in x:
                    z = float(x["z"][i, j, t])
                    y *= z / (1 + math.exp(-z))
                out[i, j, t] = y
            last[i, j] = torch.tensor(h, dtype=A.dtype)
    return out, last


@on_each(
    *("complex", "complex_gated", "complex_bare", "complex_2d_B", "complex_2d_C"),
    *("complex_2d_coefficients", "complex_groups_differ", "complex_layout_channels_last"),
)
def test_kernel_and_reference_follow_the_definition(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float64, 0)
    expected = by_definition(inputs)
    for run in (operator, operator.reference):
        torch.testing.assert_close(run(*inputs.values())[:2], expected, rtol=1e-11, atol=1e-11)


# The first step makes the state 1, the second turns it by an angle. In float32 the angles are exact
# in float64, which takes them to a part of a turn with an error of 2^-53 of them.
ANGLES = """
import torch
from fuseport.ops import register
from fuseport.ops.selective_scan import selective_scan
assert register()["selective_scan"] == "native"
generator = torch.Generator().manual_seed(0)

def turned(dtype, low, high):
    step, rate = (torch.rand(2, 20000, generator=generator, dtype=torch.float64)).to(dtype)
    step, rate = step * (high - low) + low, rate * 2 - 1
    u = torch.tensor([1.0, 0.0], dtype=dtype).expand(1, len(step), 2)
    delta = torch.stack([torch.ones_like(step), step], 1)[None]
    A, one = torch.complex(torch.zeros_like(rate), rate), torch.tensor([1.0, 0, 1, 0], dtype=dtype)
    one = one.reshape(1, 1, 4)
    _, last = selective_scan(u, delta, A[:, None], one, one, return_last_state=True)
    return last.flatten().to(torch.complex128), step.double() * rate.double()

for dtype, low, high in (
    (torch.float32, 0, 1), (torch.float32, 0, 40), (torch.float32, 1e4, 1e6),
    (torch.float64, 0, 1), (torch.float64, 0, 40),
):
    got, angle = turned(dtype, low, high)
    eps = torch.finfo(dtype).eps
    allowed = 3.5 * eps + angle.abs() * (2**-48 if dtype == torch.float32 else eps / 2)
    error = torch.view_as_real(got - torch.polar(torch.ones_like(angle), angle)).abs().amax(1)
    assert (error <= allowed).all(), (dtype, low, high, float((error / allowed).max()))
for dtype in (torch.float32, torch.float64):
    got, _ = turned(dtype, 1e9, 1e30)
    assert ((got.abs() - 1).abs() <= 4 * torch.finfo(dtype).eps).all(), "a turn changes no modulus"
"""


@pytest.mark.parametrize("isa", ["avx512", "avx2", "baseline"])
def test_states_turn_by_the_exact_angle(isa: str, run_python: Run) -> None:
    done = run_python(ANGLES, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr


@on_each("complex_channels_37", "complex_2d_coefficients")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, complex(0, math.inf)])
@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"])
def test_nan_and_inf_spread_as_in_the_reference(
    spec: OpSpec, case: Case, name: str, value: complex
) -> None:
    operator = spec.operator("selective_scan_gated")
    inputs = case.make(torch.float32, 10)
    if isinstance(value, complex) and not inputs[name].is_complex():
        value = value.imag
    first_row = inputs[name][(0,) * (inputs[name].dim() - 1)]
    first_row[len(first_row) // 2] = value
    out, last_state, _ = operator.fake(*inputs.values())
    cotangents = {"dout": torch.ones_like(out), "dlast_state": torch.ones_like(last_state)}
    assert operator.backward is not None
    gradient = spec.operator(operator.backward)
    backward_inputs = spec.backward_inputs(operator, inputs, cotangents).values()
    got = (*operator(*inputs.values()), *gradient(*backward_inputs))
    expected = (*operator.reference(*inputs.values()), *gradient.reference(*backward_inputs))
    if value != value:
        assert any(y.isnan().any() for y in expected)
    names = (*operator.outputs, *gradient.outputs)
    for output, y, wanted in zip(names, got, expected, strict=True):
        # Which part of a number has become NaN is up to the order of its arithmetic.
        if output in ("dB", "dC") and not y.is_complex():
            y, wanted = y.unflatten(-1, (-1, 2)).sum(-1), wanted.unflatten(-1, (-1, 2)).sum(-1)
        assert torch.equal(y.isfinite(), wanted.isfinite()), output
        if value != value:
            assert torch.equal(y.isnan(), wanted.isnan()), output


def test_conjugate_and_negative_views_are_taken_as_what_they_stand_for(spec: OpSpec) -> None:
    x = CASE["complex_2d_coefficients"].make(torch.float64, 1)
    u, A, B = x["u"], x["A"].conj(), x["B"].conj()
    delta = torch.complex(u, -x["delta"]).conj().imag
    assert A.is_conj()
    assert delta.is_neg()
    got = selective_scan(u, delta, A, B, x["C"], return_last_state=True)
    plain = (t.resolve_conj().resolve_neg() for t in (u, delta, A, B, x["C"]))
    torch.testing.assert_close(got, selective_scan(*plain, return_last_state=True), rtol=0, atol=0)


def test_public_function_fills_in_real_zeros(spec: OpSpec) -> None:
    x = CASE["complex_gated"].make(torch.float64, 2)
    core, zeros = (x["u"], x["delta"], x["A"], x["B"], x["C"]), torch.zeros_like(x["D"])
    got = selective_scan(*core, z=x["z"], delta_softplus=True, return_last_state=True)
    expected = reference.selective_scan_gated(*core, zeros, x["z"], zeros, True)
    torch.testing.assert_close(got, expected[:2])


class Block(torch.nn.Module):
    """A scan with complex states, whose parameters are real and its own; channels last."""

    def __init__(self, d: int = 6, n: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rate = torch.nn.Parameter(torch.rand(d, n, 2, generator=generator))
        self.project = torch.nn.Linear(d, d + 4 * n)

    def forward(self, x: Tensor) -> Tensor:
        (b, l, d), n = x.shape, self.rate.shape[1]  # noqa: E741
        delta, B, C = self.project(x).split([d, 2 * n, 2 * n], dim=2)
        A = torch.complex(-self.rate[..., 0].exp(), self.rate[..., 1])
        B, C = (t.reshape(b, l, n, 2).transpose(1, 2).reshape(b, n, 2 * l) for t in (B, C))
        return selective_scan(x.mT, delta.mT, A, B, C, delta_softplus=True).mT


def test_export_keeps_the_operator_with_batch_and_length_open(spec: OpSpec) -> None:
    model = Block()
    dims = {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("l", min=1)}
    program = torch.export.export(model, (torch.randn(2, 9, 6),), dynamic_shapes=(dims,))
    assert sum("fuseport.selective_scan" in str(n.target) for n in program.graph.nodes) == 1
    for b, l in ((1, 1), (1, 64), (3, 65)):  # noqa: E741
        x = torch.randn(b, l, 6)
        torch.testing.assert_close(program.module()(x), model(x))


def test_formats_write_it_but_for_onnx_which_says_why(spec: OpSpec, tmp_path: Path) -> None:
    model, specs = Block().eval(), (TensorSpec("x", "float32", ("batch", "length", 6)),)
    x = torch.randn(2, 16, 6)
    forward = capture_forward(model, {"x": x}, specs)
    options = formats.Options(tmp_path / "weights.safetensors")
    saved = tmp_path / "forward.pt2"
    formats.get("exported_program").write(forward, saved, options)
    torch.testing.assert_close(torch.export.load(saved).module()(x), model(x))
    for program in (forward, capture_gradient(forward)):
        with pytest.raises(ExportFailed, match=r"complex A has no form in ONNX$") as raised:
            formats.get("onnx").write(program, tmp_path / "a.onnx", options)
        assert "\n" not in str(raised.value)
