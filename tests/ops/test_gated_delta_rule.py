"""The gated delta rule as models call it: its definition, defaults, errors, instruction sets."""

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
from fuseport.ops.gated_delta_rule import cases, gated_delta_rule, onnx_native
from fuseport.ops.spec import Inputs, OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.nodes import by_nodes, contiguous

SPEC = OPS["gated_delta_rule"]
CASE = {case.name: case for case in SPEC.cases}
Run = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def spec() -> OpSpec:
    """The op, registered from its native library."""
    assert register(SPEC.name)[SPEC.name] == "native"
    return SPEC


def defined(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition, head by head and step by step, as products of matrices."""
    size, outs, states = v.shape[2] // q.shape[2], [], []
    for entry in range(q.shape[0]):
        for head in range(v.shape[2]):
            S, group = state[entry, head], head // size
            for t in range(q.shape[1]):
                decayed = g[entry, t, head].exp().diag() @ S
                key, rate = k[entry, t, group], beta[entry, t, head]
                S = decayed + torch.outer(key, rate * (v[entry, t, head] - decayed.mT @ key))
                outs.append(scale * (S.mT @ q[entry, t, group]))
            states.append(S)
    b, l, h = v.shape[:3]  # noqa: E741
    out = torch.stack(outs).unflatten(0, (b, h, l)).transpose(1, 2)
    return out, torch.stack(states).unflatten(0, (b, h))


def inputs_of(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = CASE[name].make(dtype, 0)
    return {n: t.requires_grad_() for n, t in made.items() if isinstance(t, Tensor)}


@pytest.mark.parametrize("name", ["plain", "channels", "groups", "groups_channels", "length_1"])
def test_it_is_the_definition_and_so_are_gradients(name: str) -> None:
    x = inputs_of(name)
    keys = x["q"].shape[3]
    g = x["g"].expand(*x["g"].shape[:3], keys)
    expected = defined(x["q"], x["k"], x["v"], g, x["beta"], x["initial_state"], keys**-0.5)
    given = x["g"].squeeze(3) if x["g"].shape[3] == 1 else x["g"]
    found = gated_delta_rule(
        x["q"], x["k"], x["v"], given, x["beta"], None, x["initial_state"], output_final_state=True
    )
    torch.testing.assert_close(found, expected)
    seeds = [torch.randn_like(y) for y in expected]
    wanted = list(x.values())
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted, seeds), torch.autograd.grad(expected, wanted, seeds)
    )


@pytest.mark.parametrize("name", ["groups", "chunk_plus_1"])
def test_as_transformers_computes_it(name: str) -> None:
    """Its pure-torch path, which computes in float32."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = inputs_of(name, torch.float32)
    inputs = [x["q"], x["k"], x["v"], x["g"].squeeze(3), x["beta"]]
    options = {
        "initial_state": x["initial_state"],
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    expected = modeling.torch_chunk_gated_delta_rule(*inputs, **options)
    torch.testing.assert_close(gated_delta_rule(*inputs, **options), expected)


def test_norms_are_taken_in_float32_and_rates_may_be_half() -> None:
    x = inputs_of("channels", torch.bfloat16)
    rest = x["v"], x["g"], x["beta"].bfloat16()
    found, state = gated_delta_rule(x["q"], x["k"], *rest, use_qk_l2norm_in_kernel=True)
    assert state is None
    q, k = (
        (t.float() / (t.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
        for t in (x["q"], x["k"])
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, gated_delta_rule(q, k, *rest)[0], atol=2e-2, rtol=2e-2)


def test_states_are_handed_over_between_calls() -> None:
    x = inputs_of("chunks_3_minus_1")
    sequences, state = [x[n] for n in ("q", "k", "v", "g", "beta")], x["initial_state"]
    whole = gated_delta_rule(*sequences, 0.5, state, output_final_state=True)
    parts = []
    for begin, end in ((0, 1), (1, 40), (40, 95)):
        some = [t[:, begin:end] for t in sequences]
        out, state = gated_delta_rule(*some, 0.5, state, output_final_state=True)
        parts.append(out)
    torch.testing.assert_close((torch.cat(parts, 1), state), whole)


def test_a_decay_to_nothing_begins_anew() -> None:
    """exp(-Inf) is 0: of what was before no NaN is left, nor in gradients."""
    x = inputs_of("chunk_plus_1", torch.float32)
    sequences = {n: x[n].detach() for n in ("q", "k", "v", "g", "beta")}
    sequences["g"][:, 20] = float("-inf")
    leaves = {n: t.requires_grad_() for n, t in sequences.items()}
    out, _ = gated_delta_rule(**leaves, initial_state=x["initial_state"])
    anew, _ = gated_delta_rule(**{n: t[:, 20:] for n, t in leaves.items()})
    torch.testing.assert_close(out[:, 20:], anew)
    gradients = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(t.isfinite().all() for t in gradients)


def test_a_decay_below_the_normal_numbers_is_not_nothing_to_cuda_kernels() -> None:
    """The stand-in's exponential, as a GPU's, gives 0 there."""
    operator, x = SPEC.operator("gated_delta_rule"), CASE["faint"].make(torch.float32, 0)
    seeds = stand_in.cotangents_of(SPEC, operator, x, 1)
    with stand_in.device(SPEC) as device:
        found = device.forward_and_backward(operator, x, seeds)["dinitial_state"]
    assert found is not None
    wide = {n: t.double() if isinstance(t, Tensor) else t for n, t in {**seeds, **x}.items()}
    truth = SPEC.operator("gated_delta_rule_backward").reference(*wide.values())[-1]
    torch.testing.assert_close(found.double(), truth, rtol=1e-2, atol=1e-44)


@pytest.mark.parametrize("scale", [0.0, 1e-50, -1e-46])
def test_a_scale_of_0_in_float32_is_not_left_to_the_operator_of_onnx(scale: float) -> None:
    """It would take 1/√K for it."""
    assert onnx_native.decompositions()["gated_delta_rule"](*given(), scale) is None


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan")])
def test_a_scale_that_is_not_finite_has_nodes(scale: float, fused_library: Path) -> None:
    operator = SPEC.operator("gated_delta_rule")
    _, expected = operator.reference(*given(), scale)
    for session in (Session(None, str(fused_library), 1), Session(SPEC.lowering())):
        found = by_nodes(session, SPEC, operator, [*map(Tensor.contiguous, given()), scale])
        assert not found["out"].isfinite().any()
        torch.testing.assert_close(found["final_state"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_width_of_keys_may_be_dynamic(dtype: torch.dtype) -> None:
    """Its root, which the default scale is of, is then no number."""

    class Rule(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return gated_delta_rule(q, k, v, g, beta)[0]

    given = [t.detach() for t in list(inputs_of("plain", dtype).values())[:5]]
    given[3] = given[3].squeeze(3)
    width = {3: torch.export.Dim("K", min=2)}
    sizes = (width, width, None, None, None)
    program = torch.export.export(Rule(), tuple(given), dynamic_shapes=sizes).module()
    more = [torch.cat([t, t], 3) if i < 2 else t for i, t in enumerate(given)]
    for inputs in (given, more):
        torch.testing.assert_close(program(*inputs), Rule()(*inputs))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 9, 2), "(b, l, H) = (2, 9, 3); got (2, 9, 2)"),
        ((2, 9, 6), "(b, l, H) = (2, 9, 3); got (2, 9, 6)"),
        ((2, 9), "(b, l, H) or (b, l, H, K); got (2, 9)"),
        ((2, 9, 3, 5), "(b, l, H, 1 or K) = (2, 9, 3, 6); got (2, 9, 3, 5)"),
    ],
)
def test_a_decay_is_refused_in_the_shape_it_was_given(shape: list[int], message: str) -> None:
    q, k, v, _, beta, _ = given()
    with pytest.raises(ValueError, match=re.escape(f"g must be {message}")):
        gated_delta_rule(q, k, v, torch.zeros(shape), beta)


def test_places_of_sequences_are_said_once() -> None:
    """What ops have alike is in native/."""
    sources = [p for p in SPEC.folder.parent.rglob("*.hpp") if "real_bytes(Dtype" in p.read_text()]
    assert [p.name for p in sources] == ["strided.hpp"]


def test_keys_without_channels_are_not_left_to_the_operator_of_onnx() -> None:
    """ONNX Runtime ends the process over them."""
    q, k, v, g, beta, state = given()
    none = q[..., :0], k[..., :0], v, g, beta, state[:, :, :0]
    assert onnx_native.decompositions()["gated_delta_rule"](*none, 1.0) is None


def given() -> list[Tensor]:
    made = CASE["plain"].make(torch.float32, 0)
    return [t for t in made.values() if isinstance(t, Tensor)]


@pytest.mark.parametrize("keys", [1, 3, 4])
def test_an_infinite_value_is_not_nan_in_outputs(keys: int) -> None:
    """A row that fills a state up would make it so."""
    x = cases._Shape(b=1, l=2, G=1, H=1, K=keys, V=1, initial=False).make(torch.float32, 0)
    x = {**x, "q": x["q"].abs(), "k": x["k"].abs()}
    x["v"][:, 1] = float("inf")
    operator = SPEC.operator("gated_delta_rule")
    torch.testing.assert_close(operator(*x.values()), operator.reference(*x.values()))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("sizes", [{"K": 0}, {"V": 0}, {"H": 0}, {"K": 0, "l": 0}])
def test_widths_and_heads_may_be_0(sizes: dict[str, int], channels: bool) -> None:
    x = cases._Shape(**sizes, channels=channels).make(torch.float32, 0)
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
    "v is half": lambda x: {"v": x["v"].half()},
    "g is 3-D": lambda x: {"g": x["g"][..., 0]},
    "g is half": lambda x: {"g": x["g"].half()},
    "g is of some channels": lambda x: {"g": x["g"].expand(-1, -1, -1, 2)},
    "beta is of channels": lambda x: {"beta": x["beta"][..., None]},
    "beta is on another device": lambda x: {"beta": x["beta"].to("meta")},
    "initial_state is of another batch": lambda x: {"initial_state": x["initial_state"][:1]},
    "initial_state is transposed": lambda x: {"initial_state": x["initial_state"].mT},
}


@pytest.mark.parametrize("what", [*BAD, "q has 2 of 3 heads"])
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(what: str) -> None:
    operator, good = SPEC.operator("gated_delta_rule"), CASE["plain"].make(torch.float32, 0)
    change = {"q": good["q"][:, :, :2], "k": good["k"][:, :, :2]}
    if what in BAD:
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
    assert messages[0].startswith(f"fuseport::gated_delta_rule: {next(iter(change))} must be ")
    assert len(set(messages)) == 1


LESSER_ISA = """
import torch
from fuseport.exporter.verify.op_check.symbolic import Session, Type
from fuseport.ops import OPS, register
spec = OPS["gated_delta_rule"]
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


@pytest.mark.parametrize("name", ["plain", "groups_channels"])
def test_nodes_refuse_every_input_that_does_not_fit(name: str, fused_library: Path) -> None:
    """They would read beyond it: each input in turn has a step less along each dimension."""
    operator = SPEC.operator("gated_delta_rule")
    inputs = contiguous(CASE[name].make(torch.float32, 0))
    given = {n: t for n, t in inputs.items() if isinstance(t, Tensor)}
    session, refused = Session(None, str(fused_library), 1), []

    def run(op: Type, tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        right = session(op, tensors, *rest)
        for index, (of, t) in enumerate(zip(given, tensors, strict=True)):
            for dim in range(t.dim()):
                less = t.narrow(dim, 0, t.shape[dim] - 1).contiguous()
                with pytest.raises(InvalidArgument, match="gated_delta_rule: "):
                    session(op, [*tensors[:index], less, *tensors[index + 1 :]], *rest)
                refused.append((of, dim))
        return right

    by_nodes(run, SPEC, operator, list(inputs.values()))
    assert len(refused) == sum(t.dim() for t in given.values())
