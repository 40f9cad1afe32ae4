"""The inner block of Mamba-1, made of ops: values, gradients, and what it exports as."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.formats import Options, get
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes.onnxruntime import load
from fuseport.ops import register
from fuseport.ops.compositions.mamba_inner import mamba_inner_fn, mamba_inner_fn_no_out_proj

FORMS = ("plain", "without_biases", "normalised", "projection_biases", "constant_B", "complex")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register("causal_conv1d", "selective_scan", "rms_norm")


def block(form: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of `mamba_inner_fn`, with every tensor asking for its gradient."""
    b, d, l, n, r, o = 2, 6, 9, 3, 2, 5  # noqa: E741
    generator = torch.Generator().manual_seed(FORMS.index(form))

    def normal(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    twice = 2 if form == "complex" else 1
    variable = 1 if form == "constant_B" else 2
    values: dict[str, Any] = {
        "xz": normal(b, 2 * d, l),
        "conv1d_weight": normal(d, 1, 4),
        "conv1d_bias": normal(d),
        "x_proj_weight": normal(r + variable * twice * n, d),
        "delta_proj_weight": normal(d, r),
        "out_proj_weight": normal(o, d),
        "out_proj_bias": normal(o),
        "A": -normal(d, n).abs() - 0.1,
        "D": normal(d),
        "delta_bias": normal(d),
    }
    if form == "without_biases":
        values |= {"conv1d_bias": None, "out_proj_bias": None, "delta_bias": None, "D": None}
    if form == "normalised":
        values |= {"b_rms_weight": 1 + normal(n), "c_rms_weight": 1 + normal(n)}
        values |= {"dt_rms_weight": 1 + normal(r)}
    if form == "projection_biases":
        values |= {"B_proj_bias": normal(n), "C_proj_bias": normal(n)}
    if form == "constant_B":
        values["B"] = normal(d, n)
    if form == "complex":
        values["A"] = torch.complex(values["A"], normal(d, n))
    return {
        name: v.to(dtype if not v.is_complex() else v.dtype).requires_grad_()
        if isinstance(v, Tensor)
        else v
        for name, v in values.items()
    }


def by_definition(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    **norms: Tensor,
) -> Tensor:
    """Step by step, with the operators of torch alone."""
    x, z = xz.chunk(2, 1)
    (d, n), l, r = A.shape, xz.shape[2], delta_proj_weight.shape[1]  # noqa: E741
    x = F.silu(F.conv1d(x, conv1d_weight, conv1d_bias, padding=3, groups=d)[..., :l])
    rows = x.mT @ x_proj_weight.mT  # (b, l, r + …)

    def norm(t: Tensor, weight: Tensor | None) -> Tensor:
        return t if weight is None else F.rms_norm(t, t.shape[-1:], weight, 1e-6)

    delta = norm(rows[..., :r], norms.get("dt_rms_weight")) @ delta_proj_weight.mT
    delta = F.softplus(delta if delta_bias is None else delta + delta_bias)
    width = 2 * n if A.is_complex() else n

    def states(first: int, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        t = rows[..., first : first + width]
        t = norm(t if bias is None else t + bias, weight)
        return torch.view_as_complex(t.unflatten(-1, (n, 2)).contiguous()) if A.is_complex() else t

    if B is None:
        B_rows = states(r, B_proj_bias, norms.get("b_rms_weight"))[:, :, None]
        C_rows = states(r + width, C_proj_bias, norms.get("c_rms_weight"))[:, :, None]
    else:
        B_rows = B.expand(xz.shape[0], l, d, n)
        C_rows = states(r, C_proj_bias, norms.get("c_rms_weight"))[:, :, None]
    h, outputs = torch.zeros(xz.shape[0], d, n, dtype=A.dtype), []
    for t in range(l):
        step = delta[:, t, :, None]
        h = torch.exp(step * A) * h + step * x[:, :, t, None] * B_rows[:, t]
        y = (h * C_rows[:, t]).sum(-1)
        outputs.append(2 * y.real if A.is_complex() else y)
    y = torch.stack(outputs, -1)
    y = y if D is None else y + D[:, None] * x
    return F.linear((y * F.silu(z)).mT, out_proj_weight, out_proj_bias)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_the_definition(form: str) -> None:
    given = block(form)
    if form == "complex":
        given["A"] = given["A"].detach().to(torch.complex128).requires_grad_()
    mine, right = mamba_inner_fn(**given), by_definition(**given)
    torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-11)
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    cotangent = torch.randn(mine.shape, dtype=mine.dtype)
    found = torch.autograd.grad(mine, tensors, cotangent)
    wanted = torch.autograd.grad(right, tensors, cotangent)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-10)


def test_without_the_output_projection_it_is_what_goes_into_it() -> None:
    given = block("plain")
    whole = mamba_inner_fn(**given)
    weight, bias = given.pop("out_proj_weight"), given.pop("out_proj_bias")
    inner = mamba_inner_fn_no_out_proj(**given)
    torch.testing.assert_close(F.linear(inner.mT, weight, bias), whole)


def test_in_half_precision_the_output_has_the_dtype_of_its_projection() -> None:
    given = block("plain", torch.bfloat16)
    for name in ("A", "D", "delta_bias"):
        given[name] = given[name].detach().float()
    assert mamba_inner_fn(**given).dtype == torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = block("normalised", torch.float32)
        del given["xz"]
        self.parts = nn.ParameterDict({k: nn.Parameter(v.detach()) for k, v in given.items()})

    def forward(self, xz: Tensor) -> Tensor:
        return mamba_inner_fn(xz, **dict(self.parts.items()))


def test_it_exports_as_its_ops_with_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)  # a norm of values near zero can amplify what float32 rounds off
    module = Block().eval()
    spec = TensorSpec("xz", "float32", ("batch", 12, "length"))
    example = block("normalised", torch.float32)["xz"].detach()
    forward = capture_forward(module, {"xz": example}, [spec], ("out",))
    nodes = Counter(str(node.target) for node in forward.exported.graph.nodes)
    fused = {name: count for name, count in nodes.items() if name.startswith("fuseport")}
    assert fused == {
        "fuseport.causal_conv1d.default": 1,
        "fuseport.rms_norm.default": 3,
        "fuseport.selective_scan_gated.default": 1,
    }
    gradient = capture_gradient(forward)
    file = tmp_path / "gradient.onnx"
    get("onnx").write(gradient, file, Options(tmp_path / "weights.safetensors"))
    xz = torch.randn(3, 12, 21)
    cotangent = torch.randn(3, 21, 5)
    found = load(file, {}).run({"xz": xz, "cotangent_out": cotangent})
    leaf = xz.double().requires_grad_()
    right = module.double()
    out = right(leaf)
    out.backward(cotangent.double())
    torch.testing.assert_close(found["out"].double(), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["grad/xz"].double(), leaf.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in right.named_parameters():
        torch.testing.assert_close(
            found[f"grad/{name}"].double(), parameter.grad, rtol=1e-3, atol=1e-5
        )
