"""What blocks an export: every call in a model's code that leaves torch, found in one pass."""

import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api
from fuseport.exporter.capture import blockers
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code.known_calls import advice
from fuseport.ops import OPS, build

# A real extension module: it computes on the memory of tensors, as CUDA extensions do.
EXTENSION = """
#include <cstdint>
#include <pybind11/pybind11.h>

namespace py = pybind11;

py::object fwd(py::object u) {
  py::object out = u.attr("clone")();
  auto* memory = reinterpret_cast<float*>(out.attr("data_ptr")().cast<std::uintptr_t>());
  const auto size = out.attr("numel")().cast<std::int64_t>();
  for (std::int64_t i = 1; i < size; ++i) memory[i] += 0.5f * memory[i - 1];
  return out;
}

PYBIND11_MODULE(selective_scan_cuda, m) { m.def("fwd", &fwd); }
"""
NET = """
import torch
import selective_scan_cuda
from torch import nn


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        return selective_scan_cuda.fwd(u)

    @staticmethod
    def backward(ctx, dout):
        return dout


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy()[..., ::-1].copy())

    @staticmethod
    def backward(ctx, dout):
        return dout.flip(-1)


@torch.library.custom_op("blockedlib::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = Scan.apply(self.up(x))
        y = Flip.apply(y)
        y = halve(y)
        if y.sum() > 1e9:
            y = -y
        return y
"""


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model file, the extension that it imports, and a checkpoint."""
    folder = tmp_path_factory.mktemp("their_repo")
    source = folder / "scan.cpp"
    source.write_text(EXTENSION)
    python = sysconfig.get_path("include")
    flags = (f"-I{build._TORCH / 'include'}", f"-I{python}")
    unit = build.Unit(source, ("-O0",), lambda: flags, sys.version)
    library = build.Library("test_extension", (unit,))
    (folder / "selective_scan_cuda.so").symlink_to(build.built(library))
    (folder / "their_net.py").write_text(NET)
    torch.save({"up.weight": torch.randn(8, 8), "up.bias": torch.zeros(8)}, folder / "w.pth")
    return folder


def export(folder: Path, file: str, output: Path) -> tuple[int, list[str]]:
    words = ["export", folder / "w.pth", "-o", output, "--model", f"{folder / file}:Net"]
    done = CliRunner().invoke(main, [*map(str, words), "--input-shapes", "x:[batch,length,8]"])
    lines = [line for line in done.stderr.splitlines() if not re.match(r" *\d+\.\d s ", line)]
    assert not output.exists()
    return done.exit_code, lines


def test_one_pass_lists_every_blocker_with_its_place_and_what_to_do(
    project: Path, tmp_path: Path
) -> None:
    code, [said, *lines] = export(project, "their_net.py", tmp_path / "b")
    assert code == 8
    assert "the forward program cannot be captured" in said

    def line(of: str) -> int:
        return next(i for i, text in enumerate(NET.splitlines(), 1) if of in text)

    expected = [
        (line("selective_scan_cuda.fwd(u)"), "selective_scan_cuda.fwd: a function of an extension"),
        (line("x.detach().numpy()"), "Tensor.numpy: hands its values to numpy, in the autograd "
                                     "function Flip"),
        (line("y = halve(y)"), "blockedlib::halve: an operator without a fake"),
    ]  # fmt: skip
    # That it decides by `y.sum()` blocks nothing.
    assert len(lines) == len(expected), lines
    for number, text in expected:
        assert any(f"their_net.py:{number}: {text}" in text_ for text_ in lines), (text, lines)
    assert "fuseport.ops.selective_scan computes it (--shim auto" in lines[0]
    assert "--ops FILE" in lines[2]


def test_an_error_in_eager_is_a_finding_after_what_came_before(tmp_path: Path) -> None:
    (tmp_path / "their_failing.py").write_text(
        textwrap.dedent(
            """
            from torch import nn

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.up = nn.Linear(8, 8)

                def forward(self, x):
                    y = self.up(x)
                    scale = y.max().item()
                    import causal_conv1d_cuda
                    return causal_conv1d_cuda.causal_conv1d_fwd(y) * scale
            """
        )
    )
    torch.save({"up.weight": torch.randn(8, 8), "up.bias": torch.zeros(8)}, tmp_path / "w.pth")
    code, [_, *lines] = export(tmp_path, "their_failing.py", tmp_path / "b")
    assert code == 8
    assert "their_failing.py:11: Tensor.item" in lines[0]
    assert "their_failing.py:12: ModuleNotFoundError" in lines[1]
    assert "fuseport.ops.causal_conv1d" in lines[1]


def test_imports_that_are_absent_are_all_listed_with_5(tmp_path: Path) -> None:
    (tmp_path / "their_layers.py").write_text(
        "import torch\nfrom flash_attn import flash_attn_func\n"
    )
    (tmp_path / "their_absent.py").write_text(
        "import selective_scan_cuda_oflex\nfrom their_layers import Layer\nimport no_such_thing\n"
        "try:\n    import optional_thing\nexcept ImportError:\n    pass\n"
    )
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pth")
    code, [said, *lines] = export(tmp_path, "their_absent.py", tmp_path / "b")
    assert code == 5
    assert "importing it failed" in said
    assert [text.strip().split(" is ")[0] for text in lines] == [
        "their_absent.py:1: selective_scan_cuda_oflex",
        "their_absent.py:3: no_such_thing",
        "their_layers.py:2: flash_attn",
    ]
    assert "fuseport.ops.selective_scan" in lines[0]
    assert "install it" in lines[1]
    assert "scaled_dot_product_attention" in lines[2]


@pytest.mark.parametrize(
    ("call", "op"),
    [
        ("selective_scan_cuda.fwd", "selective_scan"),
        ("selective_scan_cuda_oflex.fwd", "selective_scan"),
        ("mamba_inner_fn", "selective_scan"),
        ("causal_conv1d_cuda.causal_conv1d_fwd", "causal_conv1d"),
        ("causal_conv1d_cuda.causal_conv1d_update", "causal_conv1d_update"),
        ("mamba_ssm.ops.triton.selective_state_update", "selective_state_update"),
        ("mamba_chunk_scan_combined", "ssd_chunk_scan"),
        ("_chunk_scan_fwd_kernel", "ssd_chunk_scan"),
        ("MultiScaleDeformableAttention.ms_deform_attn_forward", "ms_deform_attn"),
        ("torchvision::deform_conv2d", "deform_conv2d"),
        ("spatial_correlation_sampler_backend.forward", "correlation"),
        ("_FunctionCorrelation", "correlation"),
        ("mmcv._ext.correlation_forward", "correlation"),
        ("bitsandbytes::gemv_4bit", "nf4_linear"),
        ("rotary_emb.apply_rotary", "rotary_embedding"),
        ("xentropy_cuda_lib.forward", "softmax_cross_entropy"),
    ],
)
def test_calls_of_known_extensions_map_to_ops(call: str, op: str) -> None:
    assert op in OPS
    assert advice(call).startswith(f"fuseport.ops.{op} computes it")


def test_calls_that_have_a_stand_in_and_no_op_are_told_of_it() -> None:
    said = "fuseport has a stand-in for {}: --shim auto"
    assert advice("pointnet2_ops._ext.furthest_point_sampling") == said.format("pointnet2_ops")
    assert advice("theirs.ops.upfirdn2d_ext") == said.format("upfirdn2d_ext")
    assert advice("theirs", otherwise="pip install theirs") == "pip install theirs"
    assert "(--shim auto, or call it yourself)" in advice("correlation_cuda.forward")
    assert "--shim" not in advice("_FunctionCorrelation")


def test_a_model_without_blockers_has_none() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    assert blockers.find(lambda: module(torch.randn(2, 4))) == ()


def test_watching_leaves_nothing_behind() -> None:
    before: tuple[Any, ...] = (sys.getprofile(), torch.autograd.Function.__dict__["apply"])
    blockers.find(lambda: torch.zeros(2).numpy())
    assert (sys.getprofile(), torch.autograd.Function.__dict__["apply"]) == before


LOOP = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        if torch.compiler.is_exporting() or x.sum() < 1e9:  # the sum is asked for in eager alone
            x = self.a(x)
        h = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            h = h * 0.5 + x[:, i]
            if i == 5:
                h = h + 1
        return h
"""


def test_a_dimension_that_comes_out_fixed_has_the_place_alone(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """Nothing that eager code does, and an export does not, is blamed."""
    checkpoint, model = saved_with(LOOP, a=torch.nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    line = LOOP[: LOOP.index("for i in")].count("\n") + 1
    said = rf"dimension 1 of input x comes out fixed at 16, at .*net\.py:{line}; give the number"
    assert re.search(said, str(raised.value))
    assert "__bool__" not in str(raised.value)
    said = str(raised.value)
    assert "or call a layer such as nn.LSTM or torch's scan there, which takes any" in said
    assert said.endswith(f"in some of its turns, as net.py:{line + 2} decides")


def test_a_loop_of_a_known_name_has_the_op_that_takes_any_length(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """mamba-minimal's scan is a method of that name."""
    head = "def forward(self, x):"
    scan = f"{head}\n        return self.selective_scan(x)\n\n    def selective_scan(self, x):"
    code = LOOP.replace(head, scan)
    checkpoint, model = saved_with(code, a=torch.nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed, match=r"or call fuseport\.ops\.selective_scan there"):
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)


def test_an_error_of_torch_whose_blockers_are_not_found_keeps_its_cause(
    tmp_path: Path,
    saved_with: Callable[..., tuple[Path, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = LOOP.replace("for i in range(x.shape[1])", "for i in range(int(x.sum() * 0))")
    monkeypatch.setattr(blockers, "find", lambda run: ())
    monkeypatch.setattr(blockers, "ending", lambda error, found: None)
    checkpoint, model = saved_with(code, a=torch.nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    assert type(raised.value.__cause__).__module__.startswith("torch")


WINDOW = """
import numpy as np
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        window = np.ones(1) * np.cbrt(x.shape[1])
        return torch.from_numpy(self.a(x).detach().numpy() * window[:, None])
"""


def test_the_line_at_which_a_capture_ends_is_told_too(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """numpy gets a dynamic size there, which is no call that hands a tensor out."""
    checkpoint, model = saved_with(WINDOW, a=torch.nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    end, second = raised.value.details[:2]
    assert ".py:11" in end
    assert end.endswith(": the capture ends here; compute it by functions of torch")
    assert "Tensor.numpy: hands its values to numpy" in second


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "at = {str((1, n)): x}[str((1, n // 2 * 2 + n % 2))]",
            "a text that dynamic sizes are in is looked up: such a size has no digits; take a key",
        ),
        (
            "rows, columns = zip(*(x[:, :2] > 9).long()); at = (x > 9)[rows, columns]",
            "a value of a tensor is read that a capture has none of; compute with tensors instead",
        ),
    ],
)
def test_what_sizes_and_values_have_not_in_a_capture_is_told(
    code: str, said: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    body = f"        n = x.shape[0]\n        {code}\n        return self.a(x) + at.sum()\n"
    net = WINDOW.partition("        window")[0] + body
    checkpoint, model = saved_with(net, a=torch.nn.Linear(3, 3))
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[length,3]")
    assert said in raised.value.details[0]


def test_an_operator_of_which_torch_knows_no_shapes_is_named(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = WINDOW.replace(
        "window = np.ones(1) * np.cbrt(x.shape[1])", "solved = torch.linalg.lstsq(x, x)"
    )
    code = code.replace("return torch.from_numpy(", "return solved[0] + (").replace(
        ".detach().numpy() * window[:, None]", ""
    )
    checkpoint, model = saved_with(code, a=torch.nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,3,3]"])
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    (only,) = raised.value.details
    assert ".py:11" in only
    assert "does not know the shapes of what aten.linalg_lstsq.default gives; register" in only


def test_a_model_that_does_not_run_at_its_inputs_is_one_line(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """Whether these are shapes or tensors, and before torch traces anything."""
    checkpoint, model = saved_with(WINDOW, a=torch.nn.Linear(3, 3))
    given: dict[str, Any] = {"inputs": "x:[batch,length,4]"}
    for words, said in (
        (given, "--input-shapes; of other sizes than batch=2, length=16: --size"),
        ({"given": {"x": torch.randn(2, 5, 4)}}, "give such examples"),
    ):
        with pytest.raises(ExportFailed) as raised:
            api.export(checkpoint, tmp_path / "b", model=model, **words)
        assert raised.value.details == ()
        assert re.search(r"at x \(2, \d+, 4\): RuntimeError: .*\.py:12\)", str(raised.value))
        assert str(raised.value).endswith(said)


def test_indices_that_are_out_of_range_ask_for_bounds(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """As hours and days that an embedding looks up, which are given as floats."""
    code = WINDOW.replace(
        "window = np.ones(1) * np.cbrt(x.shape[1])", "return self.a.weight[x.long() + 9]"
    )
    checkpoint, model = saved_with(code, a=torch.nn.Linear(3, 3))
    with pytest.raises(ExportFailed, match=r"integers with a bound, x:int64\[batch,length\]<9"):
        api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[batch,length]")


COMPILED = """
import torch

class Block(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    @torch.jit.script_method
    def forward(self, x):
        return torch.relu(self.a(x))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)
"""
ABSENT = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        assert x.sum() < 1e9
        return torch.ops.not_here.forward(self.a(x))
"""
WRITING = """
import torch

@torch.library.custom_op("tests::square_into", mutates_args=("y",))
def square_into(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x * x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        y = torch.empty_like(x)
        torch.ops.tests.square_into(self.a(x), y)
        return y
"""


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        (COMPILED, "block.a", "torch.jit compiled block in the model: .* with PYTORCH_JIT=0"),
        (ABSENT, "a", "no such operator is registered here: .* --ops"),
        (WRITING, "a", "no gradient through tests::square_into, which writes into its arguments"),
    ],
    ids=["compiled", "absent", "writing"],
)
def test_what_cannot_be_exported_is_named_with_what_to_do(
    code: str, name: str, said: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(code, **{name: torch.nn.Linear(3, 3)})
    inputs = parse_inputs(["x:[batch,3]"])
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    lines = [str(raised.value), *raised.value.details]
    assert re.search(said, "\n".join(lines))
    assert "decides by a tensor's value" not in "\n".join(lines)


def test_outputs_alone_of_an_operator_that_writes_have_no_form_in_onnx(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(WRITING.replace("_into", "_to"), a=torch.nn.Linear(3, 3))
    options: dict[str, Any] = {"model": model, "inputs": parse_inputs(["x:[batch,3]"])}
    with pytest.raises(ExportFailed, match="no form in ONNX of tests::square_to, which writes"):
        api.export(checkpoint, tmp_path / "b", **options, programs=["forward"], format=["onnx"])
