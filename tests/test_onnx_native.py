"""`--lowering native`: ONNX files with operators that ONNX Runtime has for fused ops."""

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api, formats, runtimes
from fuseport.exporter.bundle import Bundle, open_bundle

CODE = '''
import torch
from torch import nn
from torch.nn import functional as F

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan, ssd_discrete


class Block(nn.Module):
    """A block as Mamba-2 has it, with attention after it."""

    def __init__(self, heads=2, width=4, states=8):
        super().__init__()
        self.sizes = heads, width, states
        inner = heads * width
        self.split = inner, inner + 2 * states, heads
        self.in_proj = nn.Linear(12, sum(self.split), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(inner + 2 * states, 4))
        self.conv_bias = nn.Parameter(torch.empty(inner + 2 * states))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = nn.Parameter(torch.empty(inner))
        self.gated_norm = nn.Parameter(torch.empty(inner))
        self.attention = nn.Linear(inner, 3 * inner)

    def forward(self, x):
        heads, width, states = self.sizes
        z, xBC, dt = self.in_proj(x).split(self.split, -1)
        xBC = causal_conv1d(xBC.mT, self.conv_weight, self.conv_bias, activation="silu").mT
        u, B, C = xBC.split([heads * width, states, states], -1)
        u, B, C = u.unflatten(-1, (heads, width)), B.unsqueeze(2), C.unsqueeze(2)
        y = ssd_chunk_scan(
            u, dt, -torch.exp(self.A_log), B, C, D=self.D, dt_bias=self.dt_bias, dt_softplus=True
        )
        y = (y + ssd_discrete(u, -torch.exp(dt), B, C, D=self.D)[0]).flatten(2)
        y = rms_norm_gated(y, z, self.gated_norm, eps=1e-5, norm_before_gate=False)
        q, k, v = self.attention(rms_norm(y, self.norm)).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).squeeze(1)
'''

NATIVE = ["Attention", "CausalConvWithState", "LinearAttention", "RMSNormalization"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model's code, `net.py`, and its weights, `weights.pth`."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "net.py").write_text(CODE)
    scope: dict[str, object] = {}
    exec(CODE, scope)
    module: torch.nn.Module = scope["Block"]()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    state = {
        name: 0.3 * torch.randn(t.shape, generator=generator) + (t.dim() == 1)
        for name, t in module.state_dict().items()
    }
    torch.save(state, folder / "weights.pth")
    return folder


@pytest.fixture(scope="module")
def bundle(model: Path) -> Bundle:
    command = [
        sys.executable, "-m", "fuseport.cli", "export", model / "weights.pth",
        "-o", model / "bundle", "--model", f"{model}/net.py:Block",
        "--input-shapes", "x:[batch,length,12]", "--format", "onnx", "--lowering", "native",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return open_bundle(model / "bundle")


def test_native_files_stand_beside_portable_ones_and_all_pass(model: Path, bundle: Bundle) -> None:
    report = api.verify(
        bundle.folder,
        runtime=["onnxruntime", "onnxruntime+native"],
        model=f"{model}/net.py:Block",
    )
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {(row.runtime, row.artifact) for row in report.results} >= {
        ("onnxruntime", "forward.onnx"),
        ("onnxruntime", "gradient.onnx"),
        ("onnxruntime+native", "forward.native.onnx"),
        ("onnxruntime+native", "gradient.native.onnx"),
    }


def test_the_manifest_says_which_operators_are_native(bundle: Bundle) -> None:
    facts = {entry["file"]: entry for entry in bundle.manifest["artifacts"]}
    assert facts["forward.native.onnx"]["native"] == NATIVE
    assert facts["forward.native.onnx"]["opset"] == 23
    nodes = {node.op_type for node in onnx.load(bundle.folder / "forward.native.onnx").graph.node}
    assert nodes >= set(NATIVE)
    domains = {n.domain for n in onnx.load(bundle.folder / "forward.native.onnx").graph.node}
    assert "fuseport.ops" not in domains


def test_a_wrong_native_operator_is_seen(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    """A scale that is left out: ONNX Runtime then divides by √N."""
    wrong = onnx.load(bundle.folder / "forward.native.onnx")
    node = next(node for node in wrong.graph.node if node.op_type == "LinearAttention")
    kept = [attribute for attribute in node.attribute if attribute.name != "scale"]
    del node.attribute[:]
    node.attribute.extend(kept)
    onnx.save(wrong, tmp_path / "forward.native.onnx")
    report = api.verify(
        bundle.folder,
        runtime=["onnxruntime+native"],
        artifact=tmp_path / "forward.native.onnx",
        model=f"{model}/net.py:Block",
        localise=False,
    )
    assert report.exit_code() == 1


PLAIN = """
from torch import nn
from torch.nn import functional as F


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


class Attending(Linear):
    def forward(self, x):
        y = super().forward(x).unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y).squeeze(1)
"""
NONE = "ONNX has no operator of its own for any op there"
SAME = "the portable files, of opset 23 too, are the same"
BOTH = "forward.native.onnx and gradient.native.onnx"


@pytest.mark.parametrize(
    ("net", "options", "left_out"),
    [
        ("Linear", ["--format", "onnx"], f"{BOTH}: {NONE}"),
        ("Attending", ["--format", "onnx"], f"gradient.native.onnx: {NONE}"),
        ("Attending", ["--format", "onnx", "--opset", "23"], f"{BOTH}: {SAME}"),
        ("Linear", ["--format", "onnx_native"], ""),  # of what it would be a copy is not there
    ],
)
def test_a_native_file_that_is_no_more_than_the_portable_one_is_left_out(
    net: str, options: list[str], left_out: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(PLAIN)
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "w.pth")
    done = CliRunner().invoke(main, [
        "export", f"{tmp_path}/w.pth", "-o", f"{tmp_path}/b", "--model", f"{tmp_path}/net.py:{net}",
        "--input-shapes", "x:[batch,length,2]", "--lowering", "native", *options,
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    told = [line for line in done.stdout.splitlines() if line.startswith("note: no ")]
    assert told == ([f"note: no {left_out}"] if left_out else [])
    bundle = open_bundle(tmp_path / "b")
    listed = {entry["file"] for entry in bundle.manifest["artifacts"]}
    assert listed == {path.name for path in bundle.folder.glob("*.onnx")}
    native = {"forward.native.onnx", "gradient.native.onnx"}
    assert listed & native == {file for file in native if file not in left_out}


def test_the_format_and_its_runtime_are_asked_for_by_name() -> None:
    assert formats.of_file("forward.native.onnx") == "onnx_native"
    assert "onnx_native" not in formats.default()
    assert runtimes.get("onnxruntime+native").FORMAT == "onnx_native"
