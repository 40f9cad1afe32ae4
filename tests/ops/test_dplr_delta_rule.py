"""The rule of RWKV-7 as models call it: its definition, defaults, errors, instruction sets."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.exporter.verify.op_check.symbolic import Session, Type
from fuseport.ops import OPS, register
from fuseport.ops.dplr_delta_rule import cases, dplr_delta_rule
from fuseport.ops.gated_delta_rule import gated_delta_rule
from fuseport.ops.spec import Inputs, OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.nodes import by_nodes, contiguous

SPEC = OPS["dplr_delta_rule"]
CASE = {case.name: case for case in SPEC.cases}
Run = Callable[..., Any]
SEQUENCES = ("q", "k", "v", "a", "b", "log_decay")


@pytest.fixture(scope="module", autouse=True)
def spec() -> OpSpec:
    """The op, registered from its native library."""
    assert register(SPEC.name)[SPEC.name] == "native"
    return SPEC


def defined(x: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """The definition, head by head and step by step, by the matrix that multiplies a state."""
    outs, states = [], []
    for entry in range(x["q"].shape[0]):
        for head in range(x["q"].shape[2]):
            S = x["initial_state"][entry, head]
            for t in range(x["q"].shape[1]):
                q, k, v, a, b, g = (x[name][entry, t, head] for name in SEQUENCES)
                S = (g.exp().diag() + torch.outer(b, a)) @ S + torch.outer(k, v)
                outs.append(scale * (S.mT @ q))
            states.append(S)
    n, l, h = x["v"].shape[:3]  # noqa: E741
    out = torch.stack(outs).unflatten(0, (n, h, l)).transpose(1, 2)
    return out, torch.stack(states).unflatten(0, (n, h))


def inputs_of(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = CASE[name].make(dtype, 0)
    return {n: t.requires_grad_() for n, t in made.items() if isinstance(t, Tensor)}


@pytest.mark.parametrize("name", ["plain", "one_head", "length_1", "width_17"])
def test_it_is_the_definition_and_so_are_gradients(name: str) -> None:
    x = inputs_of(name)
    expected = defined(x, x["q"].shape[3] ** -0.5)
    found = dplr_delta_rule(**x, output_final_state=True)
    torch.testing.assert_close(found, expected)
    seeds = [torch.randn_like(y) for y in expected]
    wanted = list(x.values())
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted, seeds), torch.autograd.grad(expected, wanted, seeds)
    )


def test_with_one_key_to_read_and_write_it_is_the_gated_delta_rule() -> None:
    """Which decays before it reads: what reads the state has to have the decay in it."""
    x = inputs_of("chunk_plus_1")
    key, rate, decay = x["a"].detach(), x["v"].detach()[..., 0].sigmoid(), x["log_decay"].detach()
    rates = rate.unsqueeze(3)
    found = dplr_delta_rule(
        x["q"], rates * key, x["v"], decay.exp() * key, -rates * key, decay, 1.0
    )
    expected = gated_delta_rule(x["q"], key, x["v"], decay, rate, 1.0)
    torch.testing.assert_close(found, expected)


def test_decays_and_states_may_be_half() -> None:
    x = inputs_of("plain", torch.bfloat16)
    half = {n: x[n].bfloat16() for n in ("log_decay", "initial_state")}
    found, state = dplr_delta_rule(**{**x, **half})
    assert state is None
    assert found.dtype == torch.bfloat16
    rounded = {n: t.float() for n, t in half.items()}
    torch.testing.assert_close(found, dplr_delta_rule(**{**x, **rounded})[0])


def test_states_are_handed_over_between_calls() -> None:
    x = inputs_of("chunks_3_minus_1")
    sequences, state = [x[n] for n in SEQUENCES], x["initial_state"]
    whole = dplr_delta_rule(*sequences, 0.5, state, output_final_state=True)
    parts = []
    for begin, end in ((0, 1), (1, 40), (40, 95)):
        some = [t[:, begin:end] for t in sequences]
        out, state = dplr_delta_rule(*some, 0.5, state, output_final_state=True)
        parts.append(out)
    torch.testing.assert_close((torch.cat(parts, 1), state), whole)


def test_a_decay_to_nothing_where_nothing_is_read_begins_anew() -> None:
    """exp(-Inf) is 0: of what was before no NaN is left, nor in gradients."""
    x = inputs_of("chunk_plus_1", torch.float32)
    sequences = {n: x[n].detach() for n in SEQUENCES}
    sequences["log_decay"][:, 20] = float("-inf")
    sequences["a"][:, 20] = 0
    leaves = {n: t.requires_grad_() for n, t in sequences.items()}
    out, _ = dplr_delta_rule(**leaves, initial_state=x["initial_state"])
    anew, _ = dplr_delta_rule(**{n: t[:, 20:] for n, t in leaves.items()})
    torch.testing.assert_close(out[:, 20:], anew)
    gradients = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(t.isfinite().all() for t in gradients)


def test_a_decay_below_the_normal_numbers_is_not_nothing_to_cuda_kernels() -> None:
    """The stand-in's exponential, as a GPU's, gives 0 there."""
    operator, x = SPEC.operator("dplr_delta_rule"), CASE["faint"].make(torch.float32, 0)
    x["a"] = torch.zeros_like(x["a"])  # which would bring back far more
    seeds = stand_in.cotangents_of(SPEC, operator, x, 1)
    with stand_in.device(SPEC) as device:
        found = device.forward_and_backward(operator, x, seeds)["dinitial_state"]
    assert found is not None
    wide = {n: t.double() if isinstance(t, Tensor) else t for n, t in {**seeds, **x}.items()}
    truth = SPEC.operator("dplr_delta_rule_backward").reference(*wide.values())[-1]
    torch.testing.assert_close(found.double(), truth, rtol=1e-2, atol=1e-44)


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan")])
def test_a_scale_that_is_not_finite_has_nodes(scale: float, fused_library: Path) -> None:
    operator = SPEC.operator("dplr_delta_rule")
    _, expected = operator.reference(*given(), scale)
    for session in (Session(None, str(fused_library), 1), Session(SPEC.lowering())):
        found = by_nodes(session, SPEC, operator, [*map(Tensor.contiguous, given()), scale])
        assert not found["out"].isfinite().any()
        torch.testing.assert_close(found["final_state"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_width_of_keys_may_be_dynamic(dtype: torch.dtype) -> None:
    """Its root, which the default scale is of, is then no number."""

    class Rule(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return dplr_delta_rule(*inputs)[0]

    given = [t.detach() for t in list(inputs_of("plain", dtype).values())[:6]]
    width = {3: torch.export.Dim("K", min=2)}
    sizes = (tuple(None if i == 2 else width for i in range(6)),)
    program = torch.export.export(Rule(), tuple(given), dynamic_shapes=sizes).module()
    more = [t if i == 2 else torch.cat([t, t], 3) for i, t in enumerate(given)]
    for inputs in (given, more):
        torch.testing.assert_close(program(*inputs), Rule()(*inputs))


def given() -> list[Tensor]:
    made = CASE["plain"].make(torch.float32, 0)
    return [t for t in made.values() if isinstance(t, Tensor)]


@pytest.mark.parametrize("keys", [1, 3, 4])
def test_an_infinite_value_is_not_nan_in_outputs(keys: int) -> None:
    """A row that fills a state up would make it so."""
    x = cases._Shape(n=1, l=2, H=1, K=keys, V=1, initial=False).make(torch.float32, 0)
    x = {**x, "q": x["q"].abs(), "k": x["k"].abs()}
    x["v"][:, 1] = float("inf")
    operator = SPEC.operator("dplr_delta_rule")
    torch.testing.assert_close(operator(*x.values()), operator.reference(*x.values()))


@pytest.mark.parametrize("sizes", [{"K": 0}, {"V": 0}, {"H": 0}, {"K": 0, "l": 0}])
def test_widths_and_heads_may_be_0(sizes: dict[str, int]) -> None:
    x = cases._Shape(**sizes).make(torch.float32, 0)
    operator, gradient = SPEC.operators
    found, expected = operator(*x.values()), operator.reference(*x.values())
    torch.testing.assert_close(found, expected)
    seeds = [torch.ones_like(y) for y in expected]
    found, expected = (run(*seeds, *x.values()) for run in (gradient, gradient.reference))
    torch.testing.assert_close(found, expected)


def test_python_and_native_agree_on_the_chunk() -> None:
    (chunk,) = re.findall(r"CHUNK = (\d+);", (SPEC.folder / "kernel.hpp").read_text())
    assert int(chunk) == cases.CHUNK


BAD: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "q is 3-D": lambda x: {"q": x["q"][0]},
    "q is of integers": lambda x: {"q": x["q"].long()},
    "k has other heads": lambda x: {"k": x["k"][:, :, 1:]},
    "k is float64": lambda x: {"k": x["k"].double()},
    "v is 3-D": lambda x: {"v": x["v"][0]},
    "v is shorter": lambda x: {"v": x["v"][:, 1:]},
    "v has one head": lambda x: {"v": x["v"][:, :, :1]},
    "a is half": lambda x: {"a": x["a"].half()},
    "a is of values": lambda x: {"a": x["v"]},
    "b is narrower": lambda x: {"b": x["b"][..., 1:]},
    "log_decay is 3-D": lambda x: {"log_decay": x["log_decay"][..., 0]},
    "log_decay is half": lambda x: {"log_decay": x["log_decay"].half()},
    "log_decay is on another device": lambda x: {"log_decay": x["log_decay"].to("meta")},
    "initial_state is of another batch": lambda x: {"initial_state": x["initial_state"][:1]},
    "initial_state is transposed": lambda x: {"initial_state": x["initial_state"].mT},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(what: str) -> None:
    operator, good = SPEC.operator("dplr_delta_rule"), CASE["plain"].make(torch.float32, 0)
    change = BAD[what](good)
    inputs, messages = {**good, **change}, []
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in inputs.values()]
        with pytest.raises(ValueError, match="must be") as caught:
            operator(*fakes)
        messages.append(str(caught.value))
    for run in (operator, operator.reference):
        with pytest.raises(ValueError, match="must be") as caught:
            run(*inputs.values())
        messages.append(str(caught.value))
    assert messages[0].startswith(f"fuseport::dplr_delta_rule: {next(iter(change))} must be ")
    assert len(set(messages)) == 1


LESSER_ISA = """
import torch
from fuseport.exporter.verify.op_check.symbolic import Session, Type
from fuseport.ops import OPS, register
spec = OPS["dplr_delta_rule"]
assert register(spec.name)[spec.name] == "native"
operator, gradient = spec.operators
for case in spec.cases:
    for dtype in case.dtypes:
        inputs = case.make(dtype, 0)
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        outputs, truth = operator(*inputs.values()), operator.reference(*wide.values())
        torch.manual_seed(0)
        seeds = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        found = *outputs, *gradient(*seeds, *inputs.values())
        right = *truth, *gradient.reference(*(s.double() for s in seeds), *wide.values())
        for y, wanted in zip(found, right):
            if wanted.numel():
                eps = torch.finfo(y.dtype).eps
                error = float((y - wanted).abs().max() / (wanted.abs().max() + 1e-3) / eps)
                assert error < 500, (case.name, dtype, error)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(isa: str, run_python: Run) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr


def test_nodes_refuse_every_input_that_does_not_fit(fused_library: Path) -> None:
    """They would read beyond it: each input in turn has a step less along each dimension."""
    operator = SPEC.operator("dplr_delta_rule")
    inputs = contiguous(CASE["plain"].make(torch.float32, 0))
    given = {n: t for n, t in inputs.items() if isinstance(t, Tensor)}
    session, refused = Session(None, str(fused_library), 1), []

    def run(op: Type, tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        right = session(op, tensors, *rest)
        for index, (of, t) in enumerate(zip(given, tensors, strict=True)):
            for dim in range(t.dim()):
                less = t.narrow(dim, 0, t.shape[dim] - 1).contiguous()
                with pytest.raises(InvalidArgument, match="dplr_delta_rule: "):
                    session(op, [*tensors[:index], less, *tensors[index + 1 :]], *rest)
                refused.append((of, dim))
        return right

    by_nodes(run, SPEC, operator, list(inputs.values()))
    assert len(refused) == sum(t.dim() for t in given.values())
