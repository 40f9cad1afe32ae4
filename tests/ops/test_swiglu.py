"""SwiGLU: the definition, the form of one tensor, what a Llama layer computes, rounding once."""

import subprocess
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fuseport.ops.swiglu import swiglu


def test_it_is_silu_of_the_gate_times_up() -> None:
    gate, up = (4 * torch.randn(3, 37, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up)


def test_of_one_tensor_the_gate_is_the_first_half() -> None:
    x = torch.randn(2, 3, 20, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    assert torch.equal(swiglu(x), swiglu(gate, up))
    cotangent = torch.randn(2, 3, 10, dtype=torch.float64)
    (one,) = torch.autograd.grad(swiglu(x), x, cotangent)
    (two,) = torch.autograd.grad(swiglu(gate, up), x, cotangent)
    torch.testing.assert_close(one, two)


def test_it_is_what_a_llama_layer_has_between_its_projections() -> None:
    torch.manual_seed(0)
    layer = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=24))
    x = torch.randn(2, 5, 32)
    out = layer.down_proj(swiglu(layer.gate_proj(x), layer.up_proj(x)))
    torch.testing.assert_close(out, layer(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    gate, up = (2 * torch.randn(4, 300) for _ in range(2))
    gate, up = gate.to(dtype), up.to(dtype)
    exact = swiglu(gate.double(), up.double())
    error = (swiglu(gate, up).double() - exact).abs()
    smallest = torch.finfo(dtype).smallest_normal
    assert (error <= 0.51 * torch.finfo(dtype).eps * exact.abs().clamp_min(smallest)).all()


def test_gates_at_the_ends_give_what_torch_gives() -> None:
    gate = torch.tensor([-200.0, -88.0, -20.0, -0.0, 0.0, 20.0, 1e30, torch.inf, torch.nan])
    expected = torch.nn.functional.silu(gate) * 2
    torch.testing.assert_close(
        swiglu(gate, torch.full_like(gate, 2)), expected, rtol=1e-6, atol=0, equal_nan=True
    )


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="x must be of an even last size; got 5"):
        swiglu(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"up must be gate's shape = \(2, 5\); got \(2, 4\)"):
        swiglu(torch.zeros(2, 5), torch.zeros(2, 4))


def test_a_lesser_instruction_set_computes_the_same(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    code = """
import torch
from fuseport.ops import OPS
from fuseport.ops.swiglu import swiglu
for case in OPS["swiglu"].cases:
    for dtype in case.dtypes:
        given = tuple(case.make(dtype, 0).values())
        exact = swiglu(*(t.double() for t in given))
        torch.testing.assert_close(swiglu(*given), exact.to(dtype))
print("same")
"""
    done = run_python(code, FUSEPORT_ISA="baseline")
    assert done.stdout == "same\n", done.stderr
