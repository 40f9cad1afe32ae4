"""`diagnose` names what is missing or broken, says what to do, and never raises."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fuseport.exporter.doctor import Check, Diagnosis, diagnose


def check_of(name: str, diagnosis: Diagnosis | None = None) -> Check:
    checks = (diagnosis or diagnose()).checks
    return next(check for check in checks if check.name == name)


def diagnosis_without(*packages: str, path: str = "") -> Diagnosis:
    """What a process of its own finds in which these packages cannot be imported.

    Not in this process: modules that were first imported without torch stay so for all tests.
    """
    code = f"""
import json, sys
sys.path[:0] = {[path] if path else []}
sys.modules.update(dict.fromkeys({packages}))
from fuseport.exporter.doctor import diagnose
print(json.dumps(diagnose().to_json()))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Diagnosis(tuple(Check(**check) for check in json.loads(done.stdout)["checks"]))


def test_this_environment_has_all_that_is_needed() -> None:
    diagnosis = diagnose()
    assert diagnosis.ok, "\n".join(diagnosis.lines())
    assert {check.name for check in diagnosis.checks} >= {
        "fuseport",
        "Python",
        "torch",
        "C++ compiler",
        "op selective_scan",
        "cache folder",
        "onnx",
        "onnxscript",
        "ONNX Runtime",
        "fused in ONNX Runtime",
        "CUDA GPU",
        "transformers",
    }
    assert torch.__version__ in check_of("torch", diagnosis).found
    assert "CPUExecutionProvider" in check_of("ONNX Runtime", diagnosis).found


def test_json_is_plain_data_and_says_the_same() -> None:
    diagnosis = diagnose()
    data = json.loads(json.dumps(diagnosis.to_json()))
    assert data["schema"] == "fuseport.diagnosis/1"
    assert data["ok"] is diagnosis.ok
    assert [Check(**check) for check in data["checks"]] == list(diagnosis.checks)


def test_lines_show_status_and_advice_of_every_check() -> None:
    diagnosis = Diagnosis(
        (
            Check("torch", "missing", "not installed: torch", "pip install torch", required=True),
            Check("transformers", "missing", "not installed: transformers", "", required=False),
        )
    )
    assert not diagnosis.ok
    first, advice, second = diagnosis.lines()
    assert first.split() == ["missing", "torch", "not", "installed:", "torch"]
    assert advice.strip() == "pip install torch"
    assert second.startswith("optional"), "what is not needed must not look like a fault"


@pytest.mark.parametrize(
    ("package", "name"),
    [("onnx", "onnx"), ("onnxscript", "onnxscript"), ("onnxruntime", "ONNX Runtime")],
)
def test_a_package_that_is_needed_and_absent(package: str, name: str) -> None:
    diagnosis = diagnosis_without(package)
    check = check_of(name, diagnosis)
    assert not diagnosis.ok
    assert check.status == "missing"
    assert check.found == f"not installed: {package}"
    assert "pip install" in check.advice
    assert package in check.advice


def test_without_torch_the_rest_is_still_looked_at() -> None:
    diagnosis = diagnosis_without("torch")
    assert not diagnosis.ok
    assert check_of("torch", diagnosis).found == "not installed: torch"
    assert check_of("torch", diagnosis).advice.startswith("pip install 'torch")
    assert check_of("ops", diagnosis).found == "not installed: torch"
    assert check_of("CUDA GPU", diagnosis).status == "missing"
    assert check_of("onnx", diagnosis).status == "ok"
    assert check_of("C++ compiler", diagnosis).status == "ok"


def test_transformers_is_optional() -> None:
    diagnosis = diagnosis_without("transformers")
    assert diagnosis.ok
    assert check_of("transformers", diagnosis).status == "missing"
    assert "fuseport[huggingface]" in check_of("transformers", diagnosis).advice


def test_the_error_of_a_broken_package_is_shown(tmp_path: Path) -> None:
    package = tmp_path / "onnxruntime" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise OSError('libcudart.so.13: cannot open\\nshared object file')\n")
    check = check_of("ONNX Runtime", diagnosis_without(path=str(tmp_path)))
    assert check.status == "missing"
    assert check.found == "it fails: OSError: libcudart.so.13: cannot open shared object file"


@pytest.mark.parametrize(
    ("version", "status"), [("2.9.1", "missing"), ("2.13.0+cpu", "ok"), ("2.99.0", "warning")]
)
def test_torch_too_old_is_missing_and_too_new_is_untested(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check = check_of("torch")
    assert check.status == status
    assert version in check.found
    assert bool(check.advice) == (status != "ok")


def packages_of_onnxruntime(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    names = {"onnxruntime": list(packages)}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: names)


def test_onnxruntime_for_the_cpu_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    packages_of_onnxruntime(monkeypatch, "onnxruntime")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = check_of("ONNX Runtime")
    assert check.status == "ok"
    assert "from onnxruntime," in check.found


def test_two_onnxruntimes_at_once_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    packages_of_onnxruntime(monkeypatch, "onnxruntime-gpu", "onnxruntime")
    check = check_of("ONNX Runtime")
    assert check.status == "warning"
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in check.advice
    assert check.advice.endswith("pip install onnxruntime-gpu")


def test_an_onnxruntime_that_cannot_use_the_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import onnxruntime

    packages_of_onnxruntime(monkeypatch, "onnxruntime")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU of a test")
    diagnosis = diagnose()
    assert check_of("CUDA GPU", diagnosis).found == "GPU of a test"
    assert check_of("ONNX Runtime", diagnosis).status == "warning"
    assert "onnxruntime-gpu" in check_of("ONNX Runtime", diagnosis).advice


def test_without_a_compiler_ops_run_slowly_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "cache"))
    diagnosis = diagnose()
    assert diagnosis.ok, "fuseport works without a compiler"
    assert check_of("C++ compiler", diagnosis).status == "missing"
    assert "apt install g++" in check_of("C++ compiler", diagnosis).advice
    assert check_of("op selective_scan", diagnosis).status == "warning"


def test_a_compiler_without_its_standard_library_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: vector: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    check = check_of("C++ compiler")
    assert check.status == "missing"
    assert "fatal error: vector: no such file" in check.found


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for ONNX Runtime's headers, without them, and an empty cache."""
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEPORT_ONNXRUNTIME_HEADERS", str(tmp_path))
    return tmp_path


def test_without_onnxruntimes_headers_kernels_there_are_optional(headers: Path) -> None:
    diagnosis = diagnose()
    assert diagnosis.ok
    check = check_of("fused in ONNX Runtime", diagnosis)
    assert check.status == "missing"
    assert f"FUSEPORT_ONNXRUNTIME_HEADERS names {headers}" in check.advice


def test_with_the_headers_it_says_where_they_are(headers: Path) -> None:
    (headers / "onnxruntime_c_api.h").touch()
    check = check_of("fused in ONNX Runtime")
    assert check.status == "ok"
    assert f"headers in {headers}" in check.found


def test_a_library_of_kernels_that_is_there_is_shown(fused_library: Path) -> None:
    assert check_of("fused in ONNX Runtime").found.startswith(f"compiled: {fused_library.parent}")


def test_native_code_switched_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPORT_NATIVE", "0")
    check = check_of("op selective_scan")
    assert check.status == "warning"
    assert "FUSEPORT_NATIVE=0" in check.advice


def test_a_cache_folder_that_cannot_be_made_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "file" / "cache"))
    check = check_of("cache folder")
    assert check.status == "warning"
    assert "FUSEPORT_CACHE" in check.advice


def test_advice_that_many_have_is_printed_once() -> None:
    ops = [Check(f"op {name}", "warning", "slow", "install a compiler", False) for name in "abc"]
    lines = Diagnosis((*ops, Check("onnx", "ok", "1", "", True))).lines()
    assert len(lines) == 5
    assert lines[3].strip() == "install a compiler"
