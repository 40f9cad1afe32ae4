"""`fuseport ops`: each check passes good ops and sees its fault; own ops; list, build, bench."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from fuseport.cli import main
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.op_check import CHECKS, SLOW, check
from fuseport.ops import OPS, registration, support
from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec

README = Path(__file__).parent.parent / "README.md"
QUICK = [name for name in CHECKS if name not in SLOW]

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
    assert report.exit_code() == 1


def test_a_good_op_passes_whatever_the_seed() -> None:
    spec = planted(Fault(compute, gradients))
    for seed in range(5):
        report = check([spec], quick=True, seed=seed)
        assert report.exit_code() == 0, report.lines()
        lacking = {row.check for row in report.results if row.verdict == "unsupported"}
        assert lacking == {"onnx", "onnxruntime+fused"}
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


# A user's own op: a folder with Python and an ONNX form, and no native sources.
USERS_OP = """
import torch
from fuseport.ops.checks import require, require_like, require_shape
from fuseport.ops.spec import FLOATING, Case, Operator, OpSpec

def squared(x):
    return torch.ops.fuseport.NAME(x)

def checked(op, **given):
    for name, t in given.items():
        require(t.dtype in FLOATING, op, name, "floating", t.dtype)
        require(t.dim() == 2, op, name, "(b, l)", tuple(t.shape))
        require_like(op, name, t, given["x"].dtype, given["x"], "x")
        require_shape(op, name, t, "x's shape", tuple(given["x"].shape))

def reference(x):
    checked("NAME", x=x)
    return (x * x).contiguous()

def fake(x):
    checked("NAME", x=x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)

def backward(dout, x):
    checked("NAME_backward", dout=dout, x=x)
    return (SIGN * 2 * dout * x).contiguous()

def fake_backward(dout, x):
    checked("NAME_backward", dout=dout, x=x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)

def make(b, l):
    return lambda dtype, seed: {"x": torch.randn(
        b, l, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)}

SPEC = OpSpec(
    "NAME", __name__, squared,
    (
        Operator("NAME", "(Tensor x) -> Tensor out", reference, fake, "NAME_backward"),
        Operator("NAME_backward", "(Tensor dout, Tensor x) -> Tensor dx", backward, fake_backward),
    ),
    (Case("plain", "NAME", make(3, 5)), Case("one", "NAME", make(1, 1))),
)
"""
USERS_ONNX = """
import onnx.parser
import torch

DOMAIN, VERSION = "my.ops", 1

def decompositions():
    def node(name):
        return lambda *given: torch.onnx.ops.symbolic(
            f"{DOMAIN}::{name}", given, dtype=given[0].dtype, shape=given[0].shape, version=VERSION)
    return {name: node(name) for name in ("NAME", "NAME_backward")}

def functions(opset):
    head = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>'
    texts = (
        head + "NAME (x) => (out) { out = Mul(x, x) }",
        head + "NAME_backward (dout, x) => (dx) { y = Mul(dout, x)  dx = Add(y, OTHER) }",
    )
    return [onnx.parser.parse_function(text) for text in texts]
"""


def users_op(folder: Path, name: str, *, sign: str = "1", other: str = "y") -> Path:
    package = folder / name
    package.mkdir()
    source = USERS_OP.replace("NAME", name).replace("SIGN", sign)
    (package / "__init__.py").write_text(source)
    (package / "onnx.py").write_text(USERS_ONNX.replace("NAME", name).replace("OTHER", other))
    return package


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["ops", *map(str, arguments)])


def test_a_users_own_op_is_checked_in_all_runtimes(tmp_path: Path) -> None:
    done = run("check", "--ops", users_op(tmp_path, "good_square"), "--quick", "--json", "-")
    report = json.loads(done.stdout)
    verdicts = {row["check"]: row["verdict"] for row in report["results"]}
    assert set(verdicts) == set(QUICK)
    assert verdicts.pop("onnxruntime+fused") == "unsupported"
    assert set(verdicts.values()) == {"pass"}, report["results"]
    assert report["implementations"] == {"good_square": "reference"}
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("name", "fault", "check_"),
    [("signed_square", {"sign": "-1"}, "gradcheck"), ("bodied_square", {"other": "x"}, "onnx")],
)
def test_faults_of_a_users_own_op_end_with_1(
    name: str, fault: dict[str, str], check_: str, tmp_path: Path
) -> None:
    folder = users_op(tmp_path, name, **fault)
    done = run("check", name, "--ops", folder, "--only", check_)
    assert done.exit_code == 1
    assert f"fail: {name}: {check_}: plain" in " ".join(done.stdout.split())


def test_a_single_file_with_several_ops_will_do(tmp_path: Path) -> None:
    texts = [USERS_OP.replace("NAME", f"filed_{i}").replace("SIGN", "1") for i in range(2)]
    (tmp_path / "mine.py").write_text(
        f"{texts[0]}\nFIRST = SPEC\n{texts[1]}\nSPECS = [FIRST, SPEC]\n"
    )
    done = run("check", "--ops", tmp_path / "mine.py", "--only", "fake", "--json", "-")
    assert [row["op"] for row in json.loads(done.stdout)["results"]] == ["filed_0", "filed_1"]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (None, 2, "there is no file"),
        ("x = 1", 2, "defines no SPEC"),
        ("SPEC = 3", 2, "defines no SPEC"),
        ("import no_such_package", 5, "no_such_package"),
        ("from fuseport.ops import OPS\nSPECS = OPS.values()", 2, "already"),
    ],
)
def test_files_that_define_no_op(text: str | None, code: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    done = run("check", "--ops", file)
    assert done.exit_code == code
    assert message in done.stderr.splitlines()[-1]


def test_unknown_names_list_those_there_are() -> None:
    for command in ("check", "build", "bench"):
        done = run(command, "no_such_op")
        assert done.exit_code == 2
        assert "selective_scan" in done.stderr.splitlines()[-1]


def test_list_has_a_reason_for_every_empty_cell() -> None:
    content = json.loads(run("list", "--json").stdout)
    assert set(content["ops"]) == set(OPS)
    for cells in content["ops"].values():
        assert set(cells) == set(support.COLUMNS)
        assert all(cell["present"] or cell["reason"] for cell in cells.values())
    assert content["ops"]["selective_scan"]["CPU"]["present"]
    assert content["ops"]["selective_scan"]["CUDA"]["reason"] == "plain torch"


def test_list_prints_every_op() -> None:
    printed = run("list").stdout
    assert all(name in printed for name in (*OPS, *support.COLUMNS))


def test_readme_has_the_list_as_it_is() -> None:
    table = run("list", "--markdown").stdout.strip()
    pattern = r"<!-- ops list -->\n+(.*?)\n+<!-- /ops list -->"
    [found] = re.findall(pattern, README.read_text(encoding="utf-8"), re.DOTALL)
    assert found == table


def test_build_says_where_libraries_are(tmp_path: Path) -> None:
    done = run("build", "selective_scan")
    assert done.exit_code == 0
    [path] = re.findall(r"^selective_scan: (.*\.so) \(\d+\.\d s\)$", done.stdout, re.MULTILINE)
    assert Path(path).is_file()
    own = run("build", "--ops", users_op(tmp_path, "unbuilt_square"))
    assert "unbuilt_square: plain torch, nothing to compile" in own.stdout


def test_bench_times_an_op_beside_its_reference(tmp_path: Path) -> None:
    folder = users_op(tmp_path, "timed_square")
    done = run("bench", "--ops", folder, "--rounds", "2", "--json", "-")
    content = json.loads(done.stdout)
    assert {row["way"] for row in content["results"]} == {"forward", "forward + backward"}
    assert all(row["seconds"] > 0 and row["speedup"] > 0 for row in content["results"])
    assert "timed_square, plain" in run("bench", "--ops", folder, "--rounds", "1").stdout


@pytest.mark.parametrize("command", sorted(main.commands["ops"].commands))  # type: ignore[attr-defined]
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"ops {command}" in done.output
