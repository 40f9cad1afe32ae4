"""Extensions that code has torch compile: those of CUDA are left out where there is none."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.shims import _cuda
from fuseport.exporter.shims._compiled import COMPILER, Extension

pytestmark = pytest.mark.skipif(_cuda.is_there(), reason="there is CUDA to compile for")

CODE = """
from pathlib import Path
import torch
from torch.utils.cpp_extension import load, load_inline

fast = load(name="fast_scale", sources=["scale.cpp", "scale.cu"], verbose=True)
inline = load_inline("inline_scale", [""], cuda_sources=["__global__ void f() {}"])
registered = load("registered", "registered.cu", is_python_module=False)
theirs = load("knn_cuda", sources=[str(Path(__file__).parent / "knn.cu")])

class Net(torch.nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.fused = fused

    def forward(self, x):
        if self.fused:
            return fast.forward(x, self.weight)
        return x * self.weight
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "compiling_of_cuda.py"
    path.write_text(CODE)
    return path


def test_a_way_without_them_is_exported(file: Path) -> None:
    checkpoint = file.with_name("net.pt")
    torch.save({"weight": torch.rand(3)}, checkpoint)
    options = {
        "model": f"{file}:Net",
        "inputs": parse_inputs(["x:[batch,3]"]),
        "format": ["torchscript"],
        "shim": "auto",
    }
    bundle = api.export(checkpoint, file.with_name("bundle"), **options)
    said = f"stand-ins took the place of knn_cuda, {COMPILER}:"
    assert any(said in note for note in bundle.manifest["notes"])
    report = api.verify(bundle.folder, model=f"{file}:Net")
    assert report.exit_code() == 0, report.failures()


def test_they_refuse_to_be_called_and_are_compiled_again_afterwards(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(file.parent)
    with shims.installed("auto") as used:
        module = importlib.import_module(file.stem)
        assert {COMPILER, "knn_cuda"} <= {*used}
        assert isinstance(module.fast, Extension)
        assert isinstance(module.inline, Extension)
        assert module.registered is None
        assert module.theirs.KNN(1) is not None
        with pytest.raises(AttributeError, match="fast_scale has no attribute '__wrapped__'"):
            _ = module.fast.__wrapped__
        said = r"fast_scale\.forward was called.* that compiling_of_cuda\.py:6 compiles"
        with pytest.raises(NotImplementedError, match=said):
            module.Net(fused=True)(torch.ones(2, 3))
        with pytest.raises(FileNotFoundError):  # C++ alone is compiled as ever
            module.load("plain", [str(file.with_name("there_is_none.cpp"))])
    compiler = sys.modules[COMPILER]
    assert compiler.load.__module__ == COMPILER
    with pytest.raises((OSError, RuntimeError)):  # kept by the module, it is torch's again
        module.load("fast_scale", [str(file.with_name("scale.cu"))])


def test_they_are_compiled_where_nothing_else_is_said(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)  # it is imported below
    with shims.installed("knn_cuda"):
        compiler = importlib.import_module(COMPILER)
        assert compiler.load.__module__ == COMPILER
    with shims.installed(COMPILER):
        assert compiler.load.__module__ != COMPILER
    assert compiler.load.__module__ == COMPILER


@pytest.mark.parametrize(
    ("handler", "left"),
    [
        ("except Exception as error:\n    left = str(error)", True),
        ("except (ImportError, OSError) as error:\n    left = str(error)", True),
        ("except:\n    raise", False),
        ("except ValueError:\n    left = 1", False),
        ("finally:\n    pass", False),
    ],
)
def test_code_with_a_way_of_its_own_without_operators_goes_it(
    handler: str, left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRU compiles others in their place then, and asked for these in vain."""
    source = (
        "from torch.utils.cpp_extension import load\n"
        "left = None\n"
        f"try:\n    load(\n        'ways', ['w.cu'], is_python_module=False\n    )\n{handler}\n"
        "load('beside', ['w.cu'], is_python_module=False)\n"
    )
    (tmp_path / "with_a_way.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "with_a_way", raising=False)
    with shims.installed("auto"):
        module = importlib.import_module("with_a_way")
    sys.modules.pop("with_a_way")
    assert (module.left is not None) == left
    assert not left or "no CUDA to compile ways for" in module.left
