"""The checks of ops: each of them sees its fault, and passes what is good."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify import baseline
from fuseport.exporter.verify.compare import expecting, judge
from fuseport.exporter.verify.op_check import SLOW, check
from fuseport.exporter.verify.op_check.gradients import Standard
from fuseport.ops import OPS, registration
from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec

# A small op: out = (1 + double)·x·w, for x (b, l) and w (l,), and its gradients.


def checked(op: str, x: Tensor, w: Tensor) -> None:
    require(x.dim() == 2, op, "x", "(b, l)", tuple(x.shape))
    require(x.dtype in FLOATING, op, "x", "floating", dtype_name(x.dtype))
    require_like(op, "w", w, x.dtype, x, "x")
    require_shape(op, "w", w, "(l,)", (x.shape[1],))


def compute(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return (x * w * (2 if double else 1)).contiguous()


def gradients(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> tuple[Tensor, Tensor]:
    factor = 2 if double else 1
    return (dout * w * factor).contiguous(), (dout * x).sum(0) * factor


def case(name: str, b: int, l: int, double: bool, transposed: bool = False) -> Any:  # noqa: E741
    def make(dtype: torch.dtype, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(b, l, generator=generator, dtype=torch.float64).to(dtype)
        w = torch.randn(l, generator=generator, dtype=torch.float64).to(dtype)
        return {"x": x.T.contiguous().T if transposed else x, "w": w, "double": double}

    return lambda operator: Case(name, operator, make)


SHAPES = (
    case("plain", 3, 5, False),
    case("double", 3, 7, True),
    case("one", 1, 1, True),
    case("nothing", 0, 3, False),
    case("transposed", 4, 6, True, transposed=True),
)


@dataclass(frozen=True)
class Fault:
    """What is wrong with an op: parts that take the place of good ones."""

    kernel: Callable[..., Any] | None = None
    backward_kernel: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None


_numbers = itertools.count()


def planted(fault: Fault) -> OpSpec:
    """The small op with a fault, registered under a name of its own."""
    name = f"planted_{next(_numbers)}"
    back = f"{name}_backward"

    def reference(x: Tensor, w: Tensor, double: bool) -> Tensor:
        checked(name, x, w)
        return compute(x, w, double)

    def fake(x: Tensor, w: Tensor, double: bool) -> Tensor:
        checked(name, x, w)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def reference_backward(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
        checked(back, x, w)
        require_like(back, "dout", dout, x.dtype, x, "x")
        require_shape(back, "dout", dout, "x's shape", tuple(x.shape))
        return gradients(dout, x, w, double)

    def fake_backward(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
        checked(back, x, w)
        require_like(back, "dout", dout, x.dtype, x, "x")
        require_shape(back, "dout", dout, "x's shape", tuple(x.shape))
        return torch.empty(x.shape, dtype=x.dtype), torch.empty(w.shape, dtype=w.dtype)

    operators = (
        Operator(
            name,
            "(Tensor x, Tensor w, bool double) -> Tensor out",
            reference,  # type: ignore[arg-type]
            fault.fake or fake,
            back,
        ),
        Operator(
            back,
            "(Tensor dout, Tensor x, Tensor w, bool double) -> (Tensor dx, Tensor dw)",
            reference_backward,
            fake_backward,
        ),
    )
    cases = tuple(make(name) for make in SHAPES)
    spec = OpSpec(name, __name__, reference, operators, cases)
    registration.ensure(spec)
    kernels = ((operators[0], fault.kernel), (operators[1], fault.backward_kernel))
    for operator, kernel in kernels:
        if kernel is not None:  # as a native library's: in front of the reference

            def on_cpu(*given: Any, run: Any = kernel, plain: Any = operator.reference) -> Any:
                plain(*given)  # refuses what is wrong
                return run(*given)

            registration._library.impl(operator.name, on_cpu, "CPU")
    return spec


def misplaced(x: Tensor, w: Tensor, double: bool) -> Tensor:
    """As if x were contiguous."""
    flat = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
    return compute(flat, w, double)


def mutating(x: Tensor, w: Tensor, double: bool) -> Tensor:
    out = compute(x, w, double)
    w.add_(1)
    return out


def unfinished(x: Tensor, w: Tensor, double: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    out[:, 1:] = compute(x, w, double)[:, 1:]
    return out


def noisy(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return compute(x, w, double) * (1 + torch.rand(()) * 1e-3)


def by_threads(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return compute(x, w, double) * (1 + 1e-3 * (torch.get_num_threads() == 2))


def aliasing(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return x if x.is_contiguous() and not double else compute(x, w, double)


def half_wrong(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return compute(x, w, double) * (1.01 if x.dtype == torch.float16 else 1)


def every(number: int) -> Callable[..., Tensor]:
    """Wrong in every call of that number."""
    calls = itertools.count(1)

    def kernel(x: Tensor, w: Tensor, double: bool) -> Tensor:
        return compute(x, w, double) + float(next(calls) % number == 0)

    return kernel


def negative(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
    dx, dw = gradients(dout, x, w, double)
    return -dx, dw


def detached(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
    dx, dw = gradients(dout, x, w, double)
    return dx, torch.zeros_like(dw)


def slightly_off(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
    dx, dw = gradients(dout, x, w, double)
    return dx, dw * 1.01


def misread_cotangent(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
    return gradients(misplaced(dout, torch.ones_like(w), False), x, w, double)


def of_magnitudes(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
    return gradients(dout.abs(), x, w, double)


def sharing_a_scratch(dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
    """A race: threads that are here at once compute with the cotangent of one of them."""
    _scratch.append(0)
    time.sleep(0.01)
    dx, dw = gradients(dout, x, w, double)
    alone = len(_scratch) == 1
    _scratch.pop()
    return dx, dw if alone else dw * 2


_scratch: list[int] = []


def transposed_fake(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return torch.empty(x.shape[::-1], dtype=x.dtype).T


def careless_fake(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def reading_fake(x: Tensor, w: Tensor, double: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype) if x.sum() > 0 else torch.empty_like(x)


FAULTS = {
    "wrong only for memory that is not contiguous": (Fault(misplaced), "value"),
    "an element that nobody writes": (Fault(unfinished), "value"),
    "1 % off, in float16 only": (Fault(half_wrong), "value"),
    "the sign of a gradient": (Fault(backward_kernel=negative), "backward"),
    "a gradient cut off": (Fault(backward_kernel=detached), "backward"),
    "a cotangent taken for contiguous": (Fault(backward_kernel=misread_cotangent), "backward"),
    "a gradient that is the same for the opposite cotangent": (
        Fault(backward_kernel=of_magnitudes),
        "backward forms",
    ),
    "memory that threads share": (Fault(backward_kernel=sharing_a_scratch), "backward forms"),
    "a gradient 1 % off": (Fault(backward_kernel=slightly_off), "gradcheck"),
    "strides of the fake": (Fault(fake=transposed_fake), "fake"),
    "an input changed": (Fault(mutating), "inputs"),
    "an error in eager only": (Fault(fake=careless_fake), "inputs"),
    "noise": (Fault(noisy), "third call"),
    "wrong in the third call": (Fault(every(3)), "third call"),
    "wrong on two threads": (Fault(by_threads), "threads"),
    "an output that is an input": (Fault(aliasing), "opcheck"),
    "wrong in the fourth call": (Fault(every(4)), "torchscript"),
    "a fake that looks at values": (Fault(fake=reading_fake), "export"),
    "strides of the fake, compiled": (Fault(fake=transposed_fake), "torch.compile"),
    "strides of the fake, ahead of time": (Fault(fake=transposed_fake), "aot_inductor"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_each_check_sees_its_fault(what: str) -> None:
    fault, name = FAULTS[what]
    report = check([planted(fault)], only=[name])
    [row] = report.results
    assert row.verdict == "fail", row
    assert row.failures
    if name == "gradcheck":
        assert "the gradient of out by w is not the limit of differences" in str(row.failures)
    assert report.exit_code() == 1


def test_a_fake_that_follows_another_input_s_strides_is_seen() -> None:
    """Where all inputs lie alike it is right: one alone has to be moved."""
    name = "follows"

    def reference(x: Tensor, y: Tensor) -> Tensor:
        return y * x  # in the layout of y

    def fake(x: Tensor, y: Tensor) -> Tensor:
        return torch.empty_like(x)

    def make(dtype: torch.dtype, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return {k: torch.randn(3, 5, generator=generator).to(dtype) for k in ("x", "y")}

    operator = Operator(name, "(Tensor x, Tensor y) -> Tensor out", reference, fake)
    spec = OpSpec(name, __name__, reference, (operator,), (Case("plain", name, make),))
    registration.ensure(spec)
    [row] = check([spec], only=["fake"]).results
    assert row.verdict == "fail"
    assert "alone transposed: out: stride" in str(row.failures)


def test_a_good_op_passes_whatever_the_seed() -> None:
    spec = planted(Fault(compute, gradients))
    for seed in range(5):
        report = check([spec], quick=True, seed=seed)
        assert report.exit_code() == 0, report.lines()
        lacking = {row.check for row in report.results if row.verdict == "unsupported"}
        assert lacking == {"onnx", "onnx native", "onnxruntime+fused"}
        assert all(row.reason for row in report.results if row.verdict != "pass")


def test_a_good_op_passes_under_compilers() -> None:
    report = check([planted(Fault(compute, gradients))], only=SLOW)
    assert {row.verdict for row in report.results} == {"pass"}, report.lines()


def test_second_derivatives_are_neither_wrong_nor_cut_off_in_silence() -> None:
    """The gradient's own backward, here one that gives zeros."""
    good = planted(Fault())
    name = f"planted_{next(_numbers)}"
    forward, back = good.operators

    def nothing(ddx: Tensor, ddw: Tensor, dout: Tensor, x: Tensor, w: Tensor, double: bool) -> Any:
        return torch.zeros_like(dout), torch.zeros_like(x), torch.zeros_like(w)

    operators = (
        Operator(name, forward.schema, forward.reference, forward.fake, f"{name}_backward"),
        Operator(f"{name}_backward", back.schema, back.reference, back.fake, f"{name}_twice"),
        Operator(
            f"{name}_twice",
            "(Tensor ddx, Tensor ddw, Tensor dout, Tensor x, Tensor w, bool double) "
            "-> (Tensor ddout, Tensor dx, Tensor dw)",
            nothing,
            nothing,
        ),
    )
    cases = tuple(make(name) for make in SHAPES)
    [row] = check(
        [OpSpec(name, __name__, compute, operators, cases)], only=["double backward"]
    ).results
    assert row.verdict == "fail"
    assert "neither right nor refused" in str(row.reason)


@pytest.mark.parametrize(
    ("share", "further", "rounds", "right"),
    [(1.1, 1.0, 1, True), (1.1, 0.1, 3, False), (7.0, 9.0, 1, True), (9.0, 9.0, 0, False)],
    ids=["unlucky", "wrong", "very unlucky", "far off"],
)
def test_what_is_beyond_its_bound_by_little_is_looked_at_twice(
    share: float, further: float, rounds: int, right: bool
) -> None:
    """`further` is what more computations are off by, in shares of the bound of the first."""
    truth, asked = torch.ones(1000, dtype=torch.float64), []

    def off(by: float) -> dict[str, Tensor | None]:
        return {"out": torch.full((1000,), 1.0 + by, dtype=torch.float32)}

    def another(number: int) -> dict[str, Tensor | None]:
        asked.append(number)
        return off(further * bound)

    first = off(1e-4)
    bound = judge("out", first["out"], truth, expecting(first["out"], truth, None)).bound
    assert bound is not None
    held = Standard({"out": truth}, [first], another)
    assert (held.fault(off(share * bound)) is None) == right
    assert len(asked) == len(set(asked)) == rounds * baseline.FURTHER
    assert held.fault(off(30 * bound)) is not None


def test_an_op_without_cases_is_an_error_and_no_pass() -> None:
    good = planted(Fault())
    empty = OpSpec(good.name, __name__, good.function, good.operators, ())
    report = check([empty], only=["value"])
    assert [row.verdict for row in report.results] == ["error"]
    assert report.exit_code() == 6


def test_an_unknown_check_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="speed is not a check; there are: third call"):
        check([], only=["speed"])


@pytest.mark.parametrize("name", OPS)
def test_a_sample_of_every_registered_op_passes(name: str) -> None:
    """`make test-all` makes all checks on all cases."""
    report = check([OPS[name]], quick=True, cases=2, seed=1)
    assert report.exit_code() == 0, report.lines()


WRONG_KERNEL = """
from fuseport.exporter.verify.op_check import check
from fuseport.ops import OPS, registration
spec = OPS["selective_scan"]
assert registration.ensure(spec) == "native"
for operator in spec.operators:
    def wrong(*given, run=operator.reference):
        first, *rest = run(*given)
        return first * (1 + 2**-20), *rest
    registration._library.impl(operator.name, wrong, "CPU", allow_override=True)
[row] = check([spec], only=["onnxruntime+fused"], cases=1).results
assert row.verdict == "fail", row
assert "other bits" in row.reason, row
"""


def test_fused_kernels_of_other_bits_are_seen(fused_library: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WRONG_KERNEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
