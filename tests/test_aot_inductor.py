"""AOTInductor packages, in Python and in C++: compiled here, for all sizes, for such machines."""

import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.kernel import conv as kernel_conv

from fuseport.exporter import api, formats
from fuseport.exporter.bundle import MANIFEST, hash_file, machine, open_bundle, trust
from fuseport.exporter.errors import ExportFailed, Missing, UnsafeInput, UsageError
from fuseport.exporter.formats import aot_inductor as format_aot_inductor
from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import Unsupported, aot_inductor, aot_inductor_cpp
from fuseport.ops import build

RUNTIMES = ("aot_inductor", "aot_inductor_cpp")

# The fused op, outputs that are inputs, parameters and views of each other, and a size of 1.
NET = """
import torch
from fuseport.ops.selective_scan import selective_scan

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(4, 12)
        self.A = torch.nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        u, B, C = self.mix(x).mT.split([4, 4, 4], 1)
        y = selective_scan(u, u, -self.A.exp(), B[:, :3], C[:, 1:], z=x.mT, delta_softplus=True)
        return {
            "y": y, "again": y, "transposed": y.mT, "first": y[..., :1], "x": x, "A": self.A,
            "best": y.argmax(1), "total": y.sum(),
        }
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of packages alone. Read-only: copy it to change it."""
    folder = tmp_path_factory.mktemp("aot")
    (folder / "net.py").write_text(NET)
    torch.manual_seed(0)
    state = {"mix.weight": torch.randn(12, 4), "mix.bias": torch.randn(12)}
    torch.save({**state, "A": torch.randn(4, 3)}, folder / "net.pt")
    return api.export(
        folder / "net.pt",
        folder / "bundle",
        model=f"{folder / 'net.py'}:Net",
        inputs=(TensorSpec("x", "float32", ("batch", "length", 4)),),
        format=["aot_inductor"],
    ).folder


def linear() -> Program:
    torch.manual_seed(0)
    spec = TensorSpec("x", "float32", ("batch", 4))
    return capture_forward(nn.Linear(4, 3).eval(), {"x": torch.randn(2, 4)}, (spec,))


def write(program: Program, file: Path) -> Path:
    formats.get("aot_inductor").write(program, file, formats.Options(file.parent / "weights"))
    return file


def test_a_bundle_verifies_in_python_and_in_cpp(bundle: Path) -> None:
    """At held-out sizes too, and with memory layouts that the code was not compiled for."""
    report = api.verify(bundle, runtime=RUNTIMES, model=f"{bundle.parent / 'net.py'}:Net")
    assert report.exit_code(strict=True) == 0, report.failures()
    for runtime in RUNTIMES:
        rows = [row for row in report.results if row.runtime == runtime]
        assert {(row.program, row.way) for row in rows} == {
            ("forward", "run"), ("gradient", "run"), ("gradient", "forms"),
        }  # fmt: skip
        assert len({row.case for row in rows}) == 6


def test_python_and_cpp_give_the_same_bits_even_of_nothing(bundle: Path) -> None:
    spec: dict[str, Any] = open_bundle(bundle).manifest["programs"]["forward"]
    sessions = [r.load(bundle / "forward.aoti.pt2", spec) for r in (aot_inductor, aot_inductor_cpp)]
    for batch, length in ((0, 5), (1, 1), (2, 67)):
        x = torch.randn(batch, 4, length).mT
        one, other = (session.run({"x": x}) for session in sessions)
        assert list(one) == list(other) == [entry["name"] for entry in spec["outputs"]]
        for name, value in one.items():
            assert torch.equal(value, other[name]), (name, batch)
        assert torch.equal(one["output_x"], x)


def test_a_wrong_weight_in_a_package_is_located(bundle: Path, tmp_path: Path) -> None:
    weight = load_file(bundle / "weights.safetensors")["mix.weight"]
    changed = weight.clone()
    changed[5] *= 1.01
    file = tmp_path / "forward.aoti.pt2"
    with (
        zipfile.ZipFile(bundle / "forward.aoti.pt2") as old,
        zipfile.ZipFile(file, "w") as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(".so"):
                assert content.count(weight.numpy().tobytes()) == 1
                content = content.replace(weight.numpy().tobytes(), changed.numpy().tobytes())
            new.writestr(name, content)
    report = api.verify(
        bundle,
        runtime=["aot_inductor"],
        artifact=file,
        program="forward",
        model=f"{bundle.parent / 'net.py'}:Net",
        trust_native=[hash_file(file)],
    )
    (diagnosis,) = report.diagnoses
    found = diagnosis.divergence
    assert found is not None, diagnosis.reason
    assert (found.op, found.module, found.alone) == ("aten::linear", "mix", "wrong here")
    assert diagnosis.cause == "export", diagnosis.reason
    assert "its weight mix.weight is not the model's: it is off by up to 0.0" in diagnosis.reason


def test_the_manifest_says_what_it_is_compiled_for(bundle: Path) -> None:
    for entry in open_bundle(bundle).manifest["artifacts"]:
        assert entry["format"] == "aot_inductor"
        assert entry["file"] == f"{entry['program']}.aoti.pt2"
        assert entry["compiled_for"]["torch"] == torch.__version__
        if torch.cpu.get_capabilities().get("avx2") and "cpp.march" in config.get_config_copy():
            assert entry["compiled_for"]["cpu"] == ["avx2", "f16c", "fma3"]


def test_packages_name_nothing_of_the_machine(bundle: Path) -> None:
    here = (Path(torch.__file__).parent, build.cache_folder(), bundle.parent)
    with zipfile.ZipFile(bundle / "gradient.aoti.pt2") as package:
        sources = [package.read(n) for n in package.namelist() if n.endswith(".cpp")]
        assert all(source == b"// Left out: it is compiled.\n" for source in sources)
        for name in package.namelist():
            for folder in here:
                assert str(folder).encode() not in package.read(name), (name, folder)


def test_the_same_program_gives_the_same_bytes_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    hashes = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        hashes.add(hash_file(write(linear(), tmp_path / name / "f.aoti.pt2")))
    assert len(hashes) == 1
    assert not [path for path in temporary.rglob("*") if path.is_file()]
    assert not (build.cache_folder() / "inductor").exists()


class Branching(nn.Module):
    """A parameter, a buffer, a constant, a device in the graph, and graphs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.constant = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.shift + torch.ones(4, device="cpu")
        return torch.cond(
            y.sum() > 0, lambda y: y + torch.ones(4, device="cpu"), lambda y: y * 2, (y,)
        ) + self.constant  # fmt: skip


def test_a_program_for_another_device_is_apart_from_the_one_it_is_made_of() -> None:
    """Formats that are written after this one are made of the same program."""
    exported = torch.export.export(Branching().eval(), (torch.randn(2, 4),))
    tensors = {**exported.state_dict, **exported.constants}
    bits = {name: t.clone() for name, t in tensors.items()}

    def said() -> list[str]:
        graphs = [m for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
        assert len(graphs) == 3
        return [
            f"{node.format_node()} {node.kwargs} {node.meta.get('val')}"
            for graph in graphs
            for node in graph.graph.nodes
        ]

    before = said()
    there = format_aot_inductor._on_device(exported, "meta")
    assert said() == before
    now = {**exported.state_dict, **exported.constants}
    assert now.keys() == tensors.keys()
    assert all(now[name] is t and torch.equal(t, bits[name]) for name, t in tensors.items())
    assert {t.device.type for t in (*there.state_dict.values(), *there.constants.values())} == {
        "meta"
    }
    values = [n.meta["val"] for n in there.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert values
    assert {value.device.type for value in values} == {"meta"}
    x = torch.randn(2, 4)
    assert exported.module()(x).device.type == "cpu"


def test_on_the_same_device_no_tensor_is_copied() -> None:
    exported = torch.export.export(Branching().eval(), (torch.randn(2, 4),))
    same = format_aot_inductor._on_device(exported, "cpu")
    assert all(same.state_dict[name] is t for name, t in exported.state_dict.items())


def test_it_is_written_only_when_asked_for() -> None:
    assert "aot_inductor" in formats.FORMATS
    assert formats.default() == ("exported_program", "onnx", "torchscript")


def test_a_file_is_of_the_format_with_the_longest_suffix() -> None:
    assert formats.of_file("forward.aoti.pt2") == "aot_inductor"
    assert formats.of_file("forward.pt2") == "exported_program"
    with pytest.raises(UsageError, match=r"\.aoti\.pt2"):
        formats.of_file("forward.tflite")


def test_a_compiler_that_fails_or_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Missing, match="no-such-compiler"):
        write(linear(), tmp_path / "f.aoti.pt2")
    monkeypatch.setenv("CXX", "false -x")
    with pytest.raises(Missing, match="false -x"):
        write(linear(), tmp_path / "f.aoti.pt2")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ExportFailed, match="AOTInductor refuses the forward program") as raised:
        write(linear(), tmp_path / "f.aoti.pt2")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "f.aoti.pt2").exists()
    assert not (build.cache_folder() / "inductor").exists()


def repacked(package: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The package with other metadata."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("_metadata.json"):
                metadata = json.loads(content)
                bound = json.loads(metadata["fuseport"])
                change(bound)
                content = json.dumps({**metadata, "fuseport": json.dumps(bound)}).encode()
            new.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch": "2.0.0"}, r"compiled for torch 2\.0\.0, not "),
        ({"machine": "m68k"}, "compiled for machine m68k, not "),
        ({"cpu": ["avx2", "avx9000"]}, "a processor with avx9000"),
    ],
    ids=["torch", "machine", "cpu"],
)
@pytest.mark.parametrize("runtime", [aot_inductor, aot_inductor_cpp], ids=RUNTIMES)
def test_a_package_of_another_machine_is_unsupported(
    runtime: Any, change: dict[str, Any], reason: str, bundle: Path, tmp_path: Path
) -> None:
    file = repacked(
        bundle / "forward.aoti.pt2", tmp_path / "f.aoti.pt2", lambda b: b.update(change)
    )
    with pytest.raises(Unsupported, match=reason):
        runtime.load(file, {"outputs": []})


@pytest.mark.parametrize("runtime", [aot_inductor, aot_inductor_cpp], ids=RUNTIMES)
def test_a_package_of_another_device_is_unsupported(
    runtime: Any, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bundle / "forward.aoti.pt2"
    there = repacked(
        here, tmp_path / "f.aoti.pt2", lambda b: b.update({"device": "cuda", "gpu": [9, 0]})
    )
    on_a_gpu = {"outputs": [], "device": "cuda"}
    with pytest.raises(Unsupported, match=r"for cpu, not cuda; .*inductor --device cuda, or"):
        runtime.load(here, on_a_gpu)
    with pytest.raises(Unsupported, match=r"for cuda, not cpu; .*or run it with --device cuda"):
        runtime.load(there, {"outputs": []})
    monkeypatch.setattr(machine, "gpu", lambda: [8, 0])
    with pytest.raises(Unsupported, match=r"a GPU of compute capability 9\.0, not 8\.0; export it"):
        runtime.load(there, on_a_gpu)


@pytest.mark.parametrize("runtime", [aot_inductor, aot_inductor_cpp], ids=RUNTIMES)
def test_what_is_no_package_is_an_error_that_says_so(
    runtime: Any, bundle: Path, tmp_path: Path
) -> None:
    content = (bundle / "forward.aoti.pt2").read_bytes()
    file = tmp_path / "f.aoti.pt2"
    for changed in (b"", bytes(range(256)), content[: len(content) // 2]):
        file.write_bytes(changed)
        with pytest.raises(ValueError, match="no AOTInductor package"):
            runtime.load(file, {"outputs": []})
    with zipfile.ZipFile(file, "w") as package:
        package.writestr("f/data/aotinductor/model/../../../../evil.so", b"")
    with pytest.raises(ValueError, match="outside of it"):
        runtime.load(file, {"outputs": []})


class TestTrust:
    """Machine code is loaded only where this user exported it, or says that it is trusted."""

    @pytest.fixture
    def foreign(self, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The bundle on a machine that did not export it."""
        cache = tmp_path / "cache"
        shutil.copytree(build.cache_folder(), cache)
        (cache / "trusted").unlink()
        monkeypatch.setenv("FUSEPORT_CACHE", str(cache))
        return bundle

    def test_it_is_refused_by_name_and_unsupported_else(self, foreign: Path) -> None:
        model = f"{foreign.parent / 'net.py'}:Net"
        sha256 = hash_file(foreign / MANIFEST)
        with pytest.raises(UnsafeInput, match=f"--trust-native {sha256}"):
            api.verify(foreign, runtime=["aot_inductor"], model=model)
        file = foreign / "forward.aoti.pt2"
        with pytest.raises(UnsafeInput, match=hash_file(file)):
            api.verify(foreign, runtime=["aot_inductor_cpp"], artifact=file, model=model)
        assert not trust.is_trusted(sha256)

    def test_it_runs_once_it_is_trusted(self, foreign: Path) -> None:
        sha256 = hash_file(foreign / MANIFEST)
        report = api.verify(foreign, runtime=["aot_inductor"], trust_native=[sha256])
        assert report.exit_code() == 0, report.failures()
        assert trust.is_trusted(sha256)

    def test_without_a_name_the_rows_are_unsupported(self, foreign: Path) -> None:
        report = api.verify(foreign, model=f"{foreign.parent / 'net.py'}:Net")
        rows = {row.runtime: row for row in report.results if row.verdict == "unsupported"}
        assert set(rows) == set(RUNTIMES)
        assert all("--trust-native" in str(row.reason) for row in rows.values())


CONVOLUTIONS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(3, 3, 5)
        self.outer = nn.ConvTranspose1d(3, 2, 3, stride=2)

    def forward(self, x):
        x = self.inner(torch.nn.functional.pad(x, (2, 2), mode="replicate"))
        return self.outer(x.sin())
"""


def test_gradients_of_convolutions_over_any_length_and_a_format_after_them(
    tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    _, checkpoint, model = saved_net(CONVOLUTIONS)
    inputs = (TensorSpec("x", "float32", ("batch", 3, "length")),)
    options = {"model": model, "inputs": inputs, "format": ["aot_inductor", "onnx"]}
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    report = api.verify(bundle.folder, model=model, runtime=["aot_inductor", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert {row.program for row in report.results if row.runtime == "aot_inductor"} == {
        "forward",
        "gradient",
    }


def test_code_for_the_sizes_of_the_example_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Inductor's own way of choosing a kernel for gradients of convolutions has it."""
    if not hasattr(kernel_conv, "aten_convolution_backward_fallback"):
        pytest.skip("this torch has no such way")
    monkeypatch.setattr(format_aot_inductor, "_convolutions_of_any_size", nullcontext)
    spec = TensorSpec("x", "float32", ("batch", 3, "length"))
    forward = capture_forward(nn.Conv1d(3, 3, 5).eval(), {"x": torch.randn(2, 3, 9)}, [spec])
    program = capture_gradient(forward)
    options = formats.Options(tmp_path / "weights.safetensors")
    with pytest.raises(ExportFailed, match=r"fixes dimension 2 of input x at \d+ in the gradient"):
        format_aot_inductor.write(program, tmp_path / "g.aoti.pt2", options)
