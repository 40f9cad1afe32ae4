"""Models of transformers where the packages are installed whose kernels it calls on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[1] / "fixtures" / "huggingface"
PACKAGES = {
    "causal_conv1d/__init__.py": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm/__init__.py": (),
    "mamba_ssm/ops/__init__.py": (),
    "mamba_ssm/ops/selective_scan_interface.py": ("selective_scan_fn", "mamba_inner_fn"),
    "mamba_ssm/ops/triton/__init__.py": (),
    "mamba_ssm/ops/triton/selective_state_update.py": ("selective_state_update",),
}
REFUSING = """
def {name}(x, *args, **kwargs):
    assert x.is_cuda, "{name} needs a GPU"
"""
EXPORT = """
import sys
from fuseport.exporter import api
api.export(sys.argv[1], sys.argv[2], format=["torchscript"])
"""


def test_truth_on_the_cpu_is_transformers_own(tmp_path: Path) -> None:
    """Kernels for GPUs are not called there, and no case is refused for that."""
    pytest.importorskip("transformers")
    for name, functions in PACKAGES.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(REFUSING.format(name=function) for function in functions))
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", EXPORT, str(FIXTURE), str(tmp_path / "bundle")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    index = tmp_path / "bundle" / "samples" / "samples.json"
    samples = json.loads(index.read_text(encoding="utf-8"))
    assert [sample["refused"] for sample in samples] == [None] * len(samples)
