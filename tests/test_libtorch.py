"""Artifacts in C++ libtorch: the same bits as in Python, and no death that takes the rest along."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, runtimes
from fuseport.exporter.bundle import MANIFEST, hash_file, libraries, open_bundle, trust
from fuseport.exporter.runtimes import Unsupported, _host, libtorch, torchscript
from fuseport.exporter.runtimes._layouts import LAYOUTS, lay_out
from fuseport.ops import OPS, build

README = Path(__file__).parent.parent / "README.md"
# Programs of the virtual environment first, whether it is activated or not.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def saved(module: nn.Module, file: Path) -> Path:
    torch.jit.script(module).save(str(file))
    return file


def session(file: Path, *outputs: str) -> _host.HostSession:
    return libtorch.load(file, {"outputs": [{"name": name} for name in outputs]})


def same(got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert torch.equal(other, value), name


def test_a_bundle_verifies(lightning_bundle: Path) -> None:
    report = api.verify(lightning_bundle, runtime=["libtorch"])
    assert report.exit_code(strict=True) == 0, report.failures()
    rows = [row for row in report.results if row.runtime == "libtorch"]
    assert {(row.artifact, row.program, row.way) for row in rows} == {
        ("forward.pt", "forward", "run"),
        ("forward.pt", "gradient", "autograd"),
        ("gradient.pt", "gradient", "run"),
        ("forward.pt", "gradient", "autograd forms"),
        ("gradient.pt", "gradient", "forms"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_torchscript_in_python(layout: str, lightning_bundle: Path) -> None:
    programs = json.loads((lightning_bundle / MANIFEST).read_text())["programs"]
    ids = torch.randint(32, (3, 70), generator=torch.Generator().manual_seed(0))
    shape = (3, 70, programs["forward"]["outputs"][0]["dims"][-1])
    row = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1))
    seed = lay_out(row.expand(shape).contiguous(), layout)
    forward, gradient = lightning_bundle / "forward.pt", lightning_bundle / "gradient.pt"
    one, other = (runtime.load(forward, programs["forward"]) for runtime in (libtorch, torchscript))
    for _ in range(3):
        same(one.run({"input_ids": ids}), other.run({"input_ids": ids}))
    args = {"input_ids": ids}, {"logits": seed}
    gradients = one.differentiate(*args)
    same(gradients, other.differentiate(*args))
    named = {"input_ids": ids, "cotangent_logits": seed}
    one, other = (
        runtime.load(gradient, programs["gradient"]) for runtime in (libtorch, torchscript)
    )
    same(one.run(named), other.run(named))
    assert sum(name.startswith("grad/") for name in gradients) >= 20


class Strides(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        offset = torch.tensor([x.storage_offset()])
        return {"x": x.view_as(x), "strides": torch.tensor(x.stride()), "offset": offset}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_arrive_and_come_back(layout: str, tmp_path: Path) -> None:
    host = session(saved(Strides(), tmp_path / "s.pt"), "x", "strides", "offset")
    x = lay_out(torch.ones(3, 4), layout)
    results = host.run({"x": x})
    assert results["strides"].tolist() == list(x.stride())
    assert results["offset"].item() == x.storage_offset()
    assert results["x"].stride() == x.stride()
    seed = lay_out(torch.ones(3, 4), layout)
    gradient = host.differentiate({"x": torch.zeros(3, 4)}, {"x": seed})["grad/x"]
    assert gradient is not None
    assert gradient.stride() == seed.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (2, 0, 3)])
def test_dtypes_and_shapes_keep_every_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    x = (100 * torch.randn(shape)).to(dtype)
    same(session(saved(Same(), tmp_path / "s.pt"), "y").run({"x": x}), {"y": x})


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.unused = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(self.first(x)) * self.frozen, n + 1


def test_tied_unused_and_frozen_parameters_are_told_apart(tmp_path: Path) -> None:
    file = saved(Shared(), tmp_path / "s.pt")
    inputs = {"x": torch.randn(2, 3), "n": torch.tensor([1])}
    spec: dict[str, Any] = {"outputs": [{"name": "y"}, {"name": "m"}]}
    seeds = {"y": torch.randn(2, 3)}
    results = libtorch.load(file, spec).differentiate(inputs, seeds)
    same(results, torchscript.load(file, spec).differentiate(inputs, seeds))
    names = ["y", "m", "grad/x", "grad/first.weight", "grad/first.bias", "grad/unused.weight"]
    assert list(results) == names
    assert results["grad/unused.weight"] is None


def test_an_error_is_one_line_and_the_host_lives_on(tmp_path: Path) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("noise", x)
            return x @ x

    host = session(saved(Product(), tmp_path / "p.pt"), "y")
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        host.run({"x": torch.ones(2, 3)})
    assert "\n" not in str(raised.value)
    for _ in range(3):
        same(host.run({"x": torch.eye(2)}), {"y": torch.eye(2)})
    with pytest.raises(RuntimeError, match="2 tensors where 1 are expected"):
        session(saved(Shared(), tmp_path / "s.pt"), "y").run(
            {"x": torch.ones(1, 3), "n": torch.ones(1)}
        )


class Deadly(nn.Module):
    """Reads where no memory is, at one length."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        if input_ids.size(1) == 65:
            far = input_ids[:1, 0] + (1 << 40)
            one, first = torch.ones(1, 3), torch.zeros(1, dtype=torch.long)
            read = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                one, one, far, first, first, 0, -1
            )
            input_ids = input_ids + read.long()
        return self.inner(input_ids)


def test_a_dead_host_is_an_error_of_its_own_rows(lightning_bundle: Path, tmp_path: Path) -> None:
    file = saved(Deadly(torch.jit.load(lightning_bundle / "forward.pt")), tmp_path / "forward.pt")
    report = api.verify(
        lightning_bundle, runtime=["libtorch"], artifact=file, trust_native=[hash_file(file)]
    )
    rows = [row for row in report.results if (row.runtime, row.program) == ("libtorch", "forward")]
    dead = [row for row in rows if row.verdict == "error"]
    assert [row.case for row in dead] == ["past a chunk, sliced"]
    assert "the C++ host was killed by SIGSEGV" in str(dead[0].reason)
    assert len(rows) == 6
    assert {row.verdict for row in rows if row not in dead} == {"pass"}


def test_a_host_that_was_killed_is_started_anew(tmp_path: Path) -> None:
    host = session(saved(Strides(), tmp_path / "s.pt"), "x", "strides", "offset")
    host._host._popen.kill()
    host._host._popen.wait()
    assert host.run({"x": torch.ones(2)})["x"].tolist() == [1, 1]


def test_the_process_ends_with_its_session(tmp_path: Path) -> None:
    host = session(saved(Strides(), tmp_path / "s.pt"), "x", "strides", "offset")
    popen = host._host._popen
    assert popen.poll() is None
    del host
    assert popen.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[: len(content) // 2], "zip archive"),
        (lambda content: b"", "zip archive|empty"),
        (lambda content: bytes(range(256)), "zip archive"),
    ],
    ids=["half", "empty", "other bytes"],
)
def test_a_corrupt_file_is_an_error_that_says_so(
    change: Any, reason: str, lightning_bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "forward.pt"
    file.write_bytes(change((lightning_bundle / "forward.pt").read_bytes()))
    with pytest.raises(RuntimeError, match=reason) as raised:
        session(file, "logits")
    assert "\n" not in str(raised.value)


def test_without_the_library_the_missing_op_is_named(
    lightning_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = lightning_bundle / "forward.pt"
    with pytest.raises(RuntimeError, match="fuseport"):
        _host.Host("torchscript", file, [])
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(RuntimeError, match=re.escape(str(broken))):
        _host.Host("torchscript", file, [broken])
    monkeypatch.setenv("FUSEPORT_NATIVE", "0")
    elsewhere = shutil.copy(file, tmp_path / "forward.pt")
    with pytest.raises(Unsupported, match="FUSEPORT_NATIVE"):
        session(Path(elsewhere), "logits")


class TestLibraries:
    def test_the_bundle_has_the_library_and_says_of_what_kind(self, lightning_bundle: Path) -> None:
        manifest = open_bundle(lightning_bundle).manifest
        (entry,) = manifest["libraries"]
        assert entry["op"] == "selective_scan"
        assert entry["file"] == "ops/selective_scan.so"
        assert entry["torch"] == torch.__version__
        assert manifest["files"][entry["file"]]["sha256"] == hash_file(
            build.library_path(OPS["selective_scan"])
        )

    def test_the_library_names_nothing_of_the_machine(self, lightning_bundle: Path) -> None:
        content = (lightning_bundle / "ops" / "selective_scan.so").read_bytes()
        for folder in (Path(torch.__file__).parent, build.OPS_FOLDER, README.parent):
            assert str(folder).encode() not in content

    def test_the_bundles_own_is_taken_where_it_fits_and_is_trusted(
        self, lightning_bundle: Path, tmp_path: Path
    ) -> None:
        bundle = tmp_path / "b"
        shutil.copytree(lightning_bundle, bundle)
        own, local = bundle / "ops" / "selective_scan.so", build.library_path(OPS["selective_scan"])
        assert libraries.find(bundle / "forward.pt") == [own]
        outside = Path(shutil.copy(bundle / "forward.pt", tmp_path))
        assert libraries.find(outside, ["fuseport::selective_scan_gated"]) == [local]
        assert len(libraries.find(outside)) == sum(spec.has("torch.cpp") for spec in OPS.values())
        manifest = json.loads((bundle / MANIFEST).read_text())
        for change in ({"torch": "2.0.0"}, {"machine": "m68k"}, {"system": "Haiku"}):
            changed = {**manifest, "libraries": [{**manifest["libraries"][0], **change}]}
            (bundle / MANIFEST).write_text(json.dumps(changed))
            trust.add(hash_file(bundle / MANIFEST))
            assert libraries.find(bundle / "forward.pt") == [local]
        (bundle / MANIFEST).write_text(json.dumps({**manifest, "seed": 7}))
        assert libraries.find(bundle / "forward.pt") == [local]

    def test_what_cannot_be_built_is_noted(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler")
        manifest = {"ops": {"fuseport::selective_scan": ""}}
        entries, (note,) = libraries.pack(manifest, tmp_path)
        assert entries == []
        assert "selective_scan" in note
        assert "no-such-compiler" in note
        assert libraries.pack({"ops": {}}, tmp_path) == ([], [])
        assert not list(tmp_path.iterdir())


def test_without_a_compiler_the_rows_are_unsupported(
    monkeypatch: pytest.MonkeyPatch, lightning_bundle: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = runtimes.get("libtorch").missing()
    assert reason is not None
    assert "no-such-compiler" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="ldd is Linux's")
def test_the_host_links_no_python() -> None:
    done = subprocess.run(["ldd", _host.binary()], capture_output=True, text=True, check=True)
    assert "libtorch_cpu" in done.stdout
    assert "python" not in done.stdout.replace(str(Path(torch.__file__).parent), "")


@pytest.mark.skipif(shutil.which("cmake", path=PATH) is None, reason="the recipe is built by CMake")
@pytest.mark.skipif(
    torch.version.cuda is not None and shutil.which("nvcc") is None,
    reason="torch's CMake package wants the CUDA toolkit where torch is built for CUDA",
)
def test_the_recipe_in_the_readme_builds_and_runs(lightning_bundle: Path, tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    section = text[text.index("### In C++") :]
    for language, file in (("cpp", "main.cpp"), ("cmake", "CMakeLists.txt"), ("bash", "build.sh")):
        block = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
        assert block is not None, language
        (tmp_path / file).write_text(block[1])
    (tmp_path / "bundle").symlink_to(lightning_bundle)
    done = subprocess.run(
        ["bash", "-e", "build.sh"],
        cwd=tmp_path,
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout[done.stdout.index("\nloss ") :].strip().splitlines()
    printed = {name: [float(v) for v in values] for name, *values in map(str.split, lines)}
    (loss,), differences = printed.pop("loss"), printed

    model: Any = torch.jit.load(lightning_bundle / "forward.pt")
    expected = model(torch.arange(32).unsqueeze(0)).log_softmax(-1).square().mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    parameters = dict(model.named_parameters())
    assert differences.keys() == parameters.keys()
    for name, (norm, difference) in differences.items():
        assert norm == pytest.approx(parameters[name].grad.norm().item(), rel=1e-3)
        assert difference <= 1e-5 * norm
