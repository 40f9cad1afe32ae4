"""The chunked scan computes what it says: values and gradients, all cases, all dtypes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.ops import OPS, register
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan

SPEC = OPS["ssd_chunk_scan"]
CASE = {case.name: case for case in SPEC.cases}
IN_ALL_DTYPES = ("gated", "mamba_2", "packed", "discrete_mamba_3", "discrete_packed")
on_each = pytest.mark.parametrize("case", SPEC.cases, ids=lambda c: c.name)
Run = Callable[..., "subprocess.CompletedProcess[str]"]  # noqa: F821


@pytest.fixture(scope="module", autouse=True)
def spec() -> OpSpec:
    """The op, registered from its native library."""
    assert register(SPEC.name)[SPEC.name] == "native"
    return SPEC


def cotangents_of(operator: Operator, inputs: Inputs, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"d{name}": torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        for name, y in zip(operator.outputs, operator.fake(*inputs.values()), strict=True)
    }


def widened(inputs: Inputs) -> Inputs:
    return {k: v.double() if floating(v) else v for k, v in inputs.items()}


def floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def has_gradient(name: str, value: object) -> bool:
    return floating(value) and name != "dt_limit"


def differentiated(
    run: Callable[..., tuple[Tensor, ...]], inputs: Inputs, cotangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """out and final_states, and by autograd the gradients of all tensors that get one."""
    leaves = {
        name: v.detach().requires_grad_() if has_gradient(name, v) else v
        for name, v in inputs.items()
    }
    outputs = run(*leaves.values())
    wanted = {k: v for k, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}
    gradients = torch.autograd.grad(
        outputs,
        tuple(wanted.values()),
        tuple(cotangents.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    named = {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}
    return {"out": outputs[0].detach(), "final_states": outputs[1].detach(), **named}


def defined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
    dt_limit: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """The definition, step by step."""
    step = dt + dt_bias
    if dt_softplus:
        step = F.softplus(step)
    step = step.clamp(dt_limit[0], dt_limit[1])
    y, state = defined_discrete(step[..., None] * x, step * A, B, C, 0 * D, initial_states, seq_idx)
    y = y + D * x
    return (y if z is None else y * F.silu(z)), state


def defined_discrete(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
) -> tuple[Tensor, Tensor]:
    """The definition of the scan of given decays, step by step."""
    heads, groups, state = x.shape[2], B.shape[2], initial_states
    ys = [x[:, :0]]
    for t in range(x.shape[1]):
        B_t, C_t = (k[:, t].repeat_interleave(heads // groups, dim=1) for k in (B, C))
        state = torch.exp(log_decay[:, t])[..., None, None] * state
        if t:
            state = torch.where((seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None], state, 0)
        state = state + x[:, t, :, :, None] * B_t[:, :, None]
        ys.append(((state * C_t[:, :, None]).sum(-1) + D * x[:, t])[:, None])
    return torch.cat(ys, 1), state


@on_each
def test_reference_and_its_backward_are_the_definition(case: Case) -> None:
    operator, inputs = SPEC.operator(case.operator), case.make(torch.float64, 1)
    cotangents = cotangents_of(operator, inputs, 2)

    def definition(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(inputs, values, strict=True))
        if case.operator == "ssd_chunk_scan_discrete":
            return defined_discrete(**named)
        return defined(**{"z": None, **named})

    expected = differentiated(definition, inputs, cotangents)
    torch.testing.assert_close(
        differentiated(operator.reference, inputs, cotangents), expected, rtol=1e-9, atol=1e-9
    )
    gradient = SPEC.operator(operator.backward or "")
    results = gradient.reference(*SPEC.backward_inputs(operator, inputs, cotangents).values())
    for name, result in zip(gradient.outputs, results, strict=True):
        torch.testing.assert_close(result, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.in_turn(SPEC.cases, FLOATING, IN_ALL_DTYPES)
def test_kernel_is_as_good_as_the_reference(case: Case, dtype: torch.dtype) -> None:
    operator, inputs = SPEC.operator(case.operator), case.make(dtype, 3)
    cotangents = cotangents_of(operator, inputs, 4)
    wide = {name: t.double() for name, t in cotangents.items()}
    truth = differentiated(operator.reference, widened(inputs), wide)
    baseline = differentiated(operator.reference, inputs, cotangents)
    got = differentiated(operator, inputs, cotangents)
    for name, value in got.items():
        expected, plain = truth[name], baseline[name]
        assert value.dtype == plain.dtype
        assert value.shape == expected.shape
        if value.numel():
            error = (value - expected).abs().max()
            allowed = 3 * (plain - expected).abs().max()
            # Sums over all steps whose terms cancel have errors of their terms' scale.
            summed = name in ("dA", "ddt_bias")
            ulps = 256 if summed or dtype == torch.float64 else 4
            allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max()
            assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "gated", "without_softplus", "limited", "one_of_everything", "groups", "packed"),
        *("discrete", "discrete_groups", "discrete_one_of_everything"),
    ],
)
def test_gradcheck(name: str) -> None:
    operator, inputs = SPEC.operator(CASE[name].operator), CASE[name].make(torch.float64, 5)
    for key, value in inputs.items():
        if has_gradient(key, value):
            value.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: operator(*x), tuple(inputs.values()), fast_mode=True, nondet_tol=0.0
    )


@pytest.mark.parametrize("name", ["gated", "width_70", "groups", "discrete"])
def test_cotangents_may_have_any_layout(name: str) -> None:
    operator, inputs = SPEC.operator(CASE[name].operator), CASE[name].make(torch.float64, 6)
    plain = cotangents_of(operator, inputs, 7)
    for layout in (
        lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
        lambda t: t[:1, :1, :1].expand(t.shape),
        lambda t: torch.stack([t, t], -1)[..., 1],
    ):
        cotangents = {key: layout(t) for key, t in plain.items()}
        got = differentiated(operator, inputs, cotangents)
        expected = differentiated(operator.reference, inputs, cotangents)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["many_units", "heads_48", "discrete_many_units"])
def test_bits_do_not_depend_on_threads(name: str, dtype: torch.dtype) -> None:
    operator, inputs = SPEC.operator(CASE[name].operator), CASE[name].make(dtype, 8)
    cotangents = cotangents_of(operator, inputs, 9)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(differentiated(operator, inputs, cotangents))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        for key, value in run.items():
            assert torch.equal(value, runs[0][key]), key


LESSER_ISA = """
import torch
from fuseport.ops import OPS, register
assert register("ssd_chunk_scan")["ssd_chunk_scan"] == "native"
spec = OPS["ssd_chunk_scan"]

def sensitivity(f, given, index):
    # How far the reference moves when its inputs move by an ulp: a sum may nearly cancel.
    generator, eps, found = torch.Generator().manual_seed(0), torch.finfo(torch.float64).eps, []
    wanted = f.reference(*given)[index]
    for _ in range(8):
        moved = [
            v * (1 + eps * torch.randint(-1, 2, v.shape, generator=generator).double())
            if torch.is_tensor(v) and v.is_floating_point() else v
            for v in given
        ]
        found.append((f.reference(*moved)[index] - wanted).abs().max())
    return float(max(found) / (wanted.abs().max() + 1e-3) / eps)

for case in spec.cases:
    for dtype in (torch.float32, torch.float64):
        inputs, operator = case.make(dtype, 0), spec.operator(case.operator)
        outputs = operator.reference(*inputs.values())
        cotangents = {"dout": torch.ones_like(outputs[0]), "dfinal_states": outputs[1].sin()}
        gradient = spec.operator(operator.backward)
        saved = spec.backward_inputs(operator, inputs, cotangents)
        for f, given in ((operator, inputs), (gradient, saved)):
            wide = [
                v.double() if hasattr(v, "double") and v.is_floating_point() else v
                for v in given.values()
            ]
            for i, (got, wanted) in enumerate(zip(f(*given.values()), f.reference(*wide))):
                if wanted.numel():
                    scale = wanted.abs().max() + 1e-3
                    error = float((got - wanted).abs().max() / scale / torch.finfo(dtype).eps)
                    bound = 500
                    if error >= bound and dtype is torch.float64:
                        bound = 4 * sensitivity(f, wide, i)
                    assert error < bound, (case.name, dtype, f.outputs[i], error, bound)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(isa: str, run_python: Run) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr


# The public function.


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_as_transformers_computes_it(chunk_size: int) -> None:
    """Its pure-torch path, which computes in float32."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x = CASE["mamba_2"].make(torch.float32, 4)
    inputs = [x[k] for k in ("x", "dt", "A", "B", "C")]
    options = {
        "D": x["D"][:, 0],
        "dt_bias": x["dt_bias"],
        "initial_states": x["initial_states"],
        "dt_softplus": True,
        "dt_limit": (0.1, 1.0),
        "return_final_states": True,
    }
    expected = modeling.mamba2_chunk_scan(*inputs, chunk_size, **options)
    got = ssd_chunk_scan(*inputs, chunk_size, **options)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_given_is_left_out() -> None:
    x = CASE["without_softplus"].make(torch.float64, 1)
    x |= {"D": torch.zeros_like(x["D"]), "dt_bias": torch.zeros_like(x["dt_bias"])}
    out, final = SPEC.operator("ssd_chunk_scan_gated")(*x.values())
    sequences = [x[k] for k in ("x", "dt", "A", "B", "C")]
    got = ssd_chunk_scan(*sequences, z=x["z"], return_final_states=True)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], final)
    D = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with_D = ssd_chunk_scan(*sequences, z=x["z"], D=D)
    expected = out + F.silu(x["z"]) * D[:, None] * x["x"]
    torch.testing.assert_close(with_D, expected)
    (dD,) = torch.autograd.grad(with_D.sum(), D)
    torch.testing.assert_close(dD, (F.silu(x["z"]) * x["x"]).sum((0, 1, 3)))


def test_a_scan_in_two_parts_is_the_scan() -> None:
    x = CASE["chunks_3_minus_1"].make(torch.float64, 2)
    sequences = [x[k] for k in ("x", "dt", "A", "B", "C")]
    whole, last = ssd_chunk_scan(*sequences, dt_softplus=True, return_final_states=True)
    parts, state = [], None
    for part in (slice(0, 70), slice(70, None)):
        now = [t[:, part] if t.dim() > 1 else t for t in sequences]
        out, state = ssd_chunk_scan(
            *now, initial_states=state, dt_softplus=True, return_final_states=True
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3, 4, 5), (3, 9, 3, 9, 3, -1)], ids=str)
def test_packed_sequences_are_the_sequences_run_apart(numbers: tuple[int, ...]) -> None:
    """Values and gradients, to the scale of each sequence: what one holds, no other sees."""
    lengths = (5, 1, 58, 1, 70, 65)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    shape = CASE["chunks_3_minus_1"].make(torch.float64, 0)
    generator = torch.Generator().manual_seed(11)

    def drawn(t: Tensor) -> Tensor:
        long = (1, sum(lengths), *t.shape[2:]) if t.dim() > 2 else tuple(t.shape)
        return torch.randn(long, generator=generator, dtype=torch.float64)

    x = {name: drawn(shape[name]) for name in names} | {"A": shape["A"]}
    x["initial_states"] = torch.randn(
        shape["initial_states"][:1].shape, generator=generator
    ).double()
    x["dt"][:, 64:70] += 40  # a sequence that decays fast
    sequences = {"x", "dt", "B", "C", "z"}
    seq_idx = torch.tensor(numbers).repeat_interleave(torch.tensor(lengths))[None].int()
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    options = {"dt_softplus": True, "return_final_states": True}
    out, final = ssd_chunk_scan(**leaves, seq_idx=seq_idx, **options)
    cotangent, dfinal = (torch.randn(t.shape, generator=generator).double() for t in (out, final))
    packed = torch.autograd.grad((out, final), list(leaves.values()), (cotangent, dfinal))

    outs, start, last = [], 0, None
    for length in lengths:
        now = slice(start, start + length)
        own = {n: t[:, now] if n in sequences else t for n, t in leaves.items()}
        if start:
            own["initial_states"] = None
        result, last = ssd_chunk_scan(**own, **options)
        outs.append(result)
        start += length
    assert last is not None
    apart = torch.autograd.grad(
        (torch.cat(outs, 1), last), list(leaves.values()), (cotangent, dfinal)
    )
    torch.testing.assert_close(out, torch.cat(outs, 1), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(final, last, rtol=1e-11, atol=1e-13)
    for name, got, wanted in zip(leaves, packed, apart, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11, msg=name)


def test_what_a_sequence_decays_by_does_not_reach_the_next() -> None:
    """In float32, behind steps whose exponents would overflow and whose sums would round it off."""
    x = CASE["chunk"].make(torch.float32, 5)
    sequences = {k: x[k] for k in ("x", "dt", "A", "B", "C")}
    seq_idx = torch.zeros(x["dt"].shape[:2], dtype=torch.int32)
    seq_idx[:, 30:] = 1
    fast = {**sequences, "dt": x["dt"].clone()}
    fast["dt"][:, :30] = 1e30
    tails = [
        ssd_chunk_scan(**given, seq_idx=seq_idx, dt_softplus=True)[:, 30:]
        for given in (sequences, fast)
    ]
    assert torch.equal(*tails)


def test_parameters_of_the_models_dtype_are_used_in_float32() -> None:
    x = CASE["plain"].make(torch.bfloat16, 3)
    A, D, bias = x["A"].bfloat16(), x["D"].bfloat16(), x["dt_bias"].bfloat16()
    sequences = (x["x"], x["dt"])
    got = ssd_chunk_scan(*sequences, A, x["B"], x["C"], D=D, dt_bias=bias)
    wide = {"D": D.float(), "dt_bias": bias.float()}
    assert torch.equal(got, ssd_chunk_scan(*sequences, A.float(), x["B"], x["C"], **wide))


def test_options_that_do_not_fit_are_refused() -> None:
    x = CASE["plain"].make(torch.float32, 0)
    sequences = [x[k] for k in ("x", "dt", "A", "B", "C")]
    with pytest.raises(ValueError, match="seq_idx must be int32; got int64"):
        ssd_chunk_scan(*sequences, seq_idx=torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"seq_idx must be \(b, l\) = \(2, 9\); got \(2, 8\)"):
        ssd_chunk_scan(*sequences, seq_idx=torch.zeros(2, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match="chunk_size must be positive"):
        ssd_chunk_scan(*sequences, chunk_size=0)
    with pytest.raises(ValueError, match="dt_limit must be in order"):
        ssd_chunk_scan(*sequences, dt_limit=(1.0, 0.5))
    with pytest.raises(ValueError, match=r"x must be \(b, l, H, P\)"):
        ssd_chunk_scan(x["x"][0], *sequences[1:])


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that is computed."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        every = found if isinstance(found, (tuple, list)) else [found]
        sizes = [t.numel() for t in every if isinstance(t, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


@pytest.mark.parametrize(("length", "steps"), [(3, 3), (64, 64), (65, 128)])
def test_the_reference_fills_up_no_sequence_that_is_shorter_than_a_chunk(
    length: int, steps: int
) -> None:
    heads = 512
    x, decay = torch.randn(1, length, heads, 1), -torch.rand(1, length, heads)
    one, skip = torch.ones(1, length, 1, 1), torch.zeros(heads, 1)
    states, sequence = torch.zeros(1, heads, 1, 1), torch.zeros(1, length, dtype=torch.int32)
    forward, backward = (
        operator.reference for operator in SPEC.operators if "discrete" in operator.name
    )
    with Largest() as largest:
        given = (x, decay, one, one, skip, states, sequence)
        out, last = forward(*given)
        backward(out, last, *given)
    assert largest.numbers == heads * steps * min(steps, 64)
