"""`fuseport ops`: check, list, build and bench, and ops of the user's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter.verify.op_check import CHECKS, SLOW
from fuseport.ops import OPS, support

README = Path(__file__).parent.parent / "README.md"
QUICK = [name for name in CHECKS if name not in SLOW]

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
    assert verdicts.pop("onnx native") == "unsupported"
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


def test_a_kernel_that_crashes_costs_its_own_row(tmp_path: Path) -> None:
    folder = users_op(tmp_path, "crashing_square")
    code = folder / "__init__.py"
    crash = "def fake(x):\n    import os\n    os.abort()\n"
    code.write_text(code.read_text().replace("def fake(x):\n", crash))
    done = run("check", "--ops", folder, "--only", "fake", "--only", "gradcheck")
    found = " ".join(done.stdout.split())
    reason = "its process was lost: killed by SIGABRT"
    assert f"error: crashing_square: fake: {reason}" in found
    assert "gradcheck pass" in found
    assert done.exit_code == 6


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
    assert content["ops"]["selective_scan"]["CUDA"]["present"]
    assert content["ops"]["rotary_embedding"]["fused library"]["reason"] == "portable"


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
    [path] = re.findall(r"^selective_scan: (.*\.so)$", done.stdout, re.MULTILINE)
    assert Path(path).is_file()
    own = run("build", "--ops", users_op(tmp_path, "unbuilt_square"))
    assert "unbuilt_square: plain torch, nothing to compile" in own.stdout


def test_bench_times_an_op_beside_its_reference(tmp_path: Path) -> None:
    folder = users_op(tmp_path, "timed_square")
    done = run("bench", "--ops", folder, "--rounds", "2", "--json", "-")
    content = json.loads(done.stdout)
    assert {row["way"] for row in content["results"]} == {"forward", "forward + backward"}
    assert all(
        row["seconds"] > 0 and set(row["speedups"]) == {"reference", "copy"}
        for row in content["results"]
    )
    assert "timed_square, plain" in run("bench", "--ops", folder, "--rounds", "1").stdout


@pytest.mark.parametrize("command", sorted(main.commands["ops"].commands))  # type: ignore[attr-defined]
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"ops {command}" in done.output
