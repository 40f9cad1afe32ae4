"""Ops of a user's own, registered with torch by the user: exported and verified as ours are."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.user_code.op_choice import OwnOps, needed, own_ops
from fuseport.exporter.verify.report import Report
from fuseport.ops import OPS, added, build, registration
from fuseport.ops.lowering import Bodies
from fuseport.ops.spec import Case, Operator, OpSpec

EXAMPLE = Path(__file__).parent.parent / "fixtures" / "own_ops"
MY_OPS = str(EXAMPLE / "my_ops.py")
NET = f"{EXAMPLE / 'net.py'}:Net"
SHAPES = "x:[batch,length,8]"

# The same op of another name, where what the user registered is not what the reference computes.
WRONG = {
    "gradient": ("2 * dout * x.relu()", "3 * dout * x.relu()"),
    "value": ("return reference(x)  #", "return 1.001 * reference(x)  #"),
}

# As extensions have it: kernels and autograd in C++, and no fake.
COMPILED = """
#include <torch/library.h>
#include <torch/csrc/autograd/custom_function.h>
#include <ATen/ATen.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor decay(const Tensor& x, double rate) { return x.mul(rate).contiguous(); }
Tensor d_decay(const Tensor& dout, double rate) { return dout.mul(rate).contiguous(); }

template <class... Inputs>
Tensor call(const char* name, Inputs... inputs) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "")
      .typed<Tensor(const Tensor&, double)>().call(inputs...);
}

struct Decay : torch::autograd::Function<Decay> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, double rate) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["rate"] = rate;
    return call("compiledlib::decay", x, rate);
  }
  static variable_list backward(AutogradContext* ctx, variable_list cotangents) {
    const double rate = ctx->saved_data["rate"].toDouble();
    return {call("compiledlib::d_decay", cotangents[0], rate), Tensor()};
  }
};

Tensor decay_autograd(const Tensor& x, double rate) { return Decay::apply(x, rate); }

TORCH_LIBRARY(compiledlib, m) {
  m.def("decay(Tensor x, float rate=0.5) -> Tensor");
  m.def("d_decay(Tensor dout, float rate) -> Tensor");
}
TORCH_LIBRARY_IMPL(compiledlib, CPU, m) {
  m.impl("decay", &decay);
  m.impl("d_decay", &d_decay);
}
TORCH_LIBRARY_IMPL(compiledlib, Autograd, m) { m.impl("decay", &decay_autograd); }
"""
COMPILED_OPS = """
from pathlib import Path
import torch
from fuseport.ops.lowering import Bodies
from fuseport.ops.spec import Case, Operator, OpSpec

def reference(x, rate):
    return (x * rate).contiguous()

def fake(x, rate):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)

def backward(dout, rate):
    return (dout * rate).contiguous()

def example(dtype, seed):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    return {"x": x.to(dtype), "rate": 0.25}

SPEC = OpSpec(
    "decay", __name__, lambda x, rate: torch.ops.compiledlib.decay(x, rate),
    (
        Operator("decay", "(Tensor x, float rate=0.5) -> Tensor out", reference, fake, "d_decay"),
        Operator("d_decay", "(Tensor dout, float rate) -> Tensor dx", backward, fake),
    ),
    (Case("small", "decay", example),),
    namespace="compiledlib",
    library=Path(__file__).parent / "decay.so",
    onnx=Bodies("compiledlib", (
        "decay <rate> (x) => (out) {"
        " r = Constant <value_float: float = @rate> () s = CastLike(r, x) out = Mul(x, s) }",
        "d_decay <rate> (dout) => (dx) {"
        " r = Constant <value_float: float = @rate> () s = CastLike(r, dout) dx = Mul(dout, s) }",
    )),
)
"""
COMPILED_NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.ops.compiledlib.decay(self.up(x)) + torch.ops.compiledlib.decay(x, rate=0.25)
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state dict of the example's model, as its user would save it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import net  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLE))
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("own_ops") / "net.pth"
    torch.save(net.Net().state_dict(), file)
    return file


@pytest.fixture(scope="session")
def bundle(checkpoint: Path) -> Path:
    """README's export, by its own words. Read-only."""
    output = checkpoint.parent / "bundle"
    words = ["export", checkpoint, "-o", output, "--model", NET, "--ops", MY_OPS]
    done = CliRunner().invoke(main, [*map(str, words), "--input-shapes", SHAPES])
    assert done.exit_code == 0, done.output
    return output


def verdicts(report: Report) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for row in report.results:
        found.setdefault((row.runtime, row.program), set()).add(row.verdict)
    return found


def test_the_example_passes_every_check_of_ops() -> None:
    done = CliRunner().invoke(main, ["ops", "check", "--ops", MY_OPS, "--quick", "--json", "-"])
    report = json.loads(done.stdout)
    found = {row["check"]: row["verdict"] for row in report["results"]}
    assert {n for n, verdict in found.items() if verdict != "pass"} == {
        "onnx native",
        "onnxruntime+fused",
    }
    assert report["implementations"] == {"squared_relu": "user"}
    assert done.exit_code == 0


def test_the_example_is_one_node_with_a_body_in_onnx_gradients_included(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert manifest["own_ops"]["code"] == "my_ops.py"
    assert set(manifest["ops"]) == {"mylib::squared_relu", "mylib::squared_relu_backward"}
    for file, count in (("forward.onnx", {"squared_relu"}), ("gradient.onnx", None)):
        model = onnx.load(bundle / file)
        nodes = [node.op_type for node in model.graph.node if node.domain == "mylib"]
        expected = count or {"squared_relu", "squared_relu_backward"}
        assert set(nodes) == expected
        assert len(nodes) == len(expected)
        assert {f.name for f in model.functions if f.domain == "mylib"} == expected


def test_the_example_verifies_in_python_and_in_onnx(bundle: Path) -> None:
    words = ["verify", str(bundle), "--model", NET, "--ops", MY_OPS, "--json", "-"]
    names = ("torchscript", "onnxruntime")
    runtimes = [word for name in names for word in ("--runtime", name)]
    done = CliRunner().invoke(main, [*words, *runtimes])
    results = json.loads(done.stdout)["results"]
    assert done.exit_code == 0
    assert {row["verdict"] for row in results} == {"pass"}
    assert {(row["runtime"], row["program"]) for row in results} >= {
        (name, program) for name in names for program in ("forward", "gradient")
    }
    assert "squared_relu" not in OPS  # only for as long as the command runs


def test_without_its_ops_a_bundle_is_compared_as_far_as_it_can_be(bundle: Path) -> None:
    report = api.verify(bundle, runtime=["exported_program", "onnxruntime"], model=NET)
    found = verdicts(report)
    assert found["onnxruntime", "gradient"] == {"pass"}
    assert found["exported_program", "forward"] == {"unsupported"}
    reasons = {str(row.reason) for row in report.results if row.runtime == "exported_program"}
    assert reasons == {
        "mylib::squared_relu is an operator of the user's own: give its file with --ops"
    }
    assert any("my_ops.py" in note and "--ops" in note for note in report.notes)


def test_bench_imports_the_ops_again(bundle: Path) -> None:
    result = api.bench(
        bundle,
        runtime=["exported_program"],
        program="forward",
        model=NET,
        ops=MY_OPS,
        rounds=1,
        sizes=[{"batch": 1, "length": 4}],
    )
    assert result.exit_code() == 0
    assert all(timing.ratio for timing in result.results)


def test_bodies_may_call_functions_of_types_and_one_that_is_absent_is_named(
    tmp_path: Path,
) -> None:
    """`Gelu` is such a function in ONNX; onnx's evaluator refuses it in a body without types."""
    source = (EXAMPLE / "my_ops.py").read_text().replace("mylib", "gelulib")
    bodies = source[
        source.index('            "squared_relu (x)') : source.index("        ),\n    ),\n)")
    ]
    body = """            "squared_relu (x) => (out) { r = Relu(x) s = Mul(r, r) g = Gelu(r) "
            "h = Sub(g, g) out = Add(s, h) }","""
    file = tmp_path / "gelu_ops.py"
    file.write_text(source.replace(bodies, body + "\n"))
    arguments = ["ops", "check", "--ops", str(file), "--only", "onnx", "--json", "-"]
    result = CliRunner().invoke(main, arguments)
    trials = json.loads(result.stdout)
    said = json.dumps(trials)
    assert "context dependent" not in said
    assert "there is no form of gelulib::squared_relu_backward, which gradient.onnx" in said


@pytest.mark.parametrize("fault", WRONG)
def test_an_op_that_is_not_its_reference_fails(
    fault: str, checkpoint: Path, tmp_path: Path
) -> None:
    name = f"wrong_{fault}"
    source = (EXAMPLE / "my_ops.py").read_text().replace("mylib", name)
    old, new = WRONG[fault]
    kernel, declared = source.split("# What fuseport needs")
    if fault == "gradient":
        kernel = kernel.replace("return reference_backward(dout, x)", f"return {new}")
    else:
        kernel = kernel.replace(old, new)
    (tmp_path / f"{name}_ops.py").write_text(f"{kernel}# What fuseport needs{declared}")
    net = (EXAMPLE / "net.py").read_text().replace("my_ops", f"{name}_ops")
    (tmp_path / f"{name}_net.py").write_text(net)
    given: dict[str, Any] = {
        "model": f"{tmp_path / f'{name}_net.py'}:Net",
        "ops": str(tmp_path / f"{name}_ops.py"),
    }
    from fuseport.exporter.models.user import parse_inputs

    inputs = parse_inputs([SHAPES])
    api.export(checkpoint, tmp_path / "b", inputs=inputs, format=["exported_program"], **given)
    report = api.verify(tmp_path / "b", runtime=["exported_program"], localise=False, **given)
    assert report.exit_code() == 1
    programs = {row.program for row in report.results if row.verdict == "fail"}
    assert "gradient" in programs
    assert ("forward" in programs) == (fault == "value")


def compiled(source: Path) -> Path:
    """A library for torch, once for each machine."""
    include = build._TORCH / "include"
    flags = (f"-I{include}", f"-I{include / 'torch/csrc/api/include'}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    units = (build.Unit(source, ("-O0", abi), lambda: flags, torch.__version__),)
    link = (f"-L{build._TORCH / 'lib'}", "-ltorch_cpu", "-lc10")
    return build.built(build.Library("test_decay", units, link))


def test_a_compiled_library_gets_a_fake_and_runs_in_cpp_too(tmp_path: Path) -> None:
    source = tmp_path / "decay.cpp"
    source.write_text(COMPILED)
    (tmp_path / "decay.so").symlink_to(compiled(source))
    (tmp_path / "decay_ops.py").write_text(COMPILED_OPS)
    (tmp_path / "decay_net.py").write_text(COMPILED_NET)
    state = {"up.weight": torch.randn(8, 8), "up.bias": torch.randn(8)}
    torch.save(state, tmp_path / "decay.pth")
    from fuseport.exporter.models.user import parse_inputs

    given: dict[str, Any] = {
        "model": f"{tmp_path / 'decay_net.py'}:Net",
        "ops": str(tmp_path / "decay_ops.py"),
    }
    bundle = api.export(
        tmp_path / "decay.pth",
        tmp_path / "b",
        inputs=parse_inputs([SHAPES]),
        format=["torchscript", "onnx"],
        **given,
    )
    assert [entry["op"] for entry in bundle.manifest["libraries"]] == ["decay"]
    report = api.verify(bundle.folder, runtime=["libtorch", "onnxruntime"], **given)
    assert report.exit_code() == 0, report.failures()
    found = verdicts(report)
    assert found["onnxruntime", "gradient"] == {"pass"}
    assert found["libtorch", "forward"] == found["libtorch", "gradient"] == {"pass"}


@contextmanager
def library(namespace: str, schema: str) -> Iterator[torch.library.Library]:
    """Operators as Python registers them piece by piece, with nothing but kernels."""
    own = torch.library.Library(namespace, "DEF")
    own.define(schema)
    yield own


def test_what_a_user_has_not_registered_is_added(tmp_path: Path) -> None:
    del tmp_path

    def twice(x: torch.Tensor) -> torch.Tensor:
        return (2 * x).contiguous()

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    with library("barelib", "twice(Tensor x) -> Tensor") as own:
        own.impl("twice", twice, "CPU")
        spec = OpSpec(
            "twice",
            __name__,
            twice,
            (
                Operator("twice", "(Tensor x) -> Tensor out", twice, like, "twice_backward"),
                Operator("twice_backward", "(Tensor dout) -> Tensor dx", twice, like),
            ),
            (Case("one", "twice", lambda dtype, seed: {"x": torch.ones(3, dtype=dtype)}),),
            namespace="barelib",
        )
        with added([spec]):
            assert registration.implementation(spec) == "user"
            added_ = ("autograd of barelib::twice", "barelib::twice_backward")
            assert registration.python_only(spec) == added_
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(torch.ops.barelib.twice, (x,))
            torch.library.opcheck(torch.ops.barelib.twice.default, (x,))


def square(schema: str = "(Tensor x) -> Tensor out", **changes: Any) -> OpSpec:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return (x * x).contiguous()

    operator = Operator("squared_relu", schema, reference, reference)
    case = Case("one", "squared_relu", lambda dtype, seed: {"x": torch.ones(3, dtype=dtype)})
    values = {"name": "other", "namespace": "mylib", **changes}
    return OpSpec(
        package=__name__, function=reference, operators=(operator,), cases=(case,), **values
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (square("(Tensor x, int n) -> Tensor out"), "is registered as (Tensor x) -> Tensor"),
        (square(name="rms_norm"), "there is an op rms_norm already"),
        (square(namespace="fuseport", name="rms_norm_2"), None),
    ],
)
def test_ops_that_cannot_be_added_say_why(spec: OpSpec, message: str | None) -> None:
    with own_ops(MY_OPS):  # registers mylib::squared_relu
        pass
    if message is None:
        with added([spec]):
            assert OPS["rms_norm_2"] is spec
        return
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        added([spec]).__enter__()
    assert spec.name not in OPS or OPS[spec.name] is not spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("squared_relu (y) => (out) { out = Mul(y, y) }", "its operator has no y"),
        ("squared_relu (x) => (x2) { x2 = Mul(x, x) }", "its operator has no x2"),
        ("other (x) => (out) { out = Mul(x, x) }", "is of no operator"),
        ("squared_relu (x => (out)", "its form in ONNX"),
    ],
)
def test_bodies_that_do_not_fit_are_refused(text: str, message: str, tmp_path: Path) -> None:
    source = (EXAMPLE / "my_ops.py").read_text().replace("mylib", "bodylib")
    changed = source.replace("squared_relu (x) => (out) { r = Relu(x) out = Mul(r, r) }", text)
    file = tmp_path / f"body_{abs(hash(text))}.py"
    file.write_text(changed)
    with pytest.raises(UsageError, match=message) as refusal, own_ops(str(file)):
        pass
    assert "its form in ONNX" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_changed_is_told(tmp_path: Path) -> None:
    noted = {"own_ops": {"code": "my_ops.py", "sha256": "0"}}
    other = OwnOps(str(tmp_path), "my_ops.py", "1", ())
    assert "is not as my_ops.py was at the export" in str(needed(noted, other))
    assert needed(noted, OwnOps(str(tmp_path), "my_ops.py", "0", ())) is None
    assert needed({}, None) is None
    with pytest.raises(Missing, match="--ops"):
        needed(noted, None)


def test_two_nodes_of_one_name_are_refused() -> None:
    spec = square(
        namespace="fuseport",
        onnx=Bodies("fuseport.ops", ("squared_relu (x) => (out) { out = Mul(x, x) }",)),
    )
    assert spec.lowers
    assert spec.lowering().functions(20)[0].domain == "fuseport.ops"
    assert set(spec.lowering().decompositions()) == {"squared_relu"}
