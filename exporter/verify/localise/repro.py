"""A script and its data that show a mismatch with torch, onnx and onnxruntime alone."""

import math
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter.bundle import WEIGHTS, libraries
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.program import one_line
from fuseport.exporter.runtimes._layouts import apart
from fuseport.exporter.verify.compare import Expected, judge
from fuseport.exporter.verify.localise._repro_script import SETTINGS, TEXT, WHAT
from fuseport.exporter.verify.localise.investigation import Finding
from fuseport.exporter.verify.localise.look import Alone, dtype_of
from fuseport.exporter.verify.localise.scene import Failure, Scene
from fuseport.exporter.verify.sample import opened
from fuseport.ops import OPS, onnxruntime_library, ort
from fuseport.ops.build import BuildError
from fuseport.ops.registration import implementation

__all__ = ["DATA", "SCRIPT", "written"]

SCRIPT = "repro.py"
DATA = "data.safetensors"

# How the script runs what each runtime runs.
_KINDS = {
    "onnxruntime": "onnxruntime",
    "onnxruntime+fused": "onnxruntime",
    "onnxruntime+native": "onnxruntime",
    "onnx_reference": "onnx_reference",
    "torchscript": "torchscript",
    "libtorch": "torchscript",
    "exported_program": "exported_program",
    "eager": "exported_program",
    "aot_inductor": "aot_inductor",
    "aot_inductor_cpp": "aot_inductor",
}


class _CannotError(Exception):
    """There is no such script; the message says why."""


@dataclass(frozen=True)
class _Content:
    """What a script runs, and what that should give.

    Attributes:
        file: to run.
        inputs: in order.
        cotangents: by output; None to run it only.
        truth: of what is compared.
        operators: that are in it.
        what: it shows, in words.
        runtime: that shows it.
    """

    file: Path
    inputs: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor] | None
    truth: Mapping[str, tuple[Tensor, Expected]]
    operators: frozenset[str]
    what: str
    runtime: str


def written(finding: Finding, failure: Failure, scene: Scene, folder: Path) -> str:
    """Write a script that ends with 1 while the mismatch is there, and try it.

    It runs the op that is at fault alone, or else the whole artifact.

    Returns:
        A sentence: where the script is, or why there is none.
    """
    reasons: list[str] = []
    for content in _contents(finding, failure, scene):
        try:
            _write(content, folder)
            done = _tried(folder, scene.trials.limits.seconds)
        except (_CannotError, FuseportError, BuildError, OSError) as error:
            reasons.append(one_line(error).removeprefix("_CannotError: "))
            continue
        if done.returncode == 1 and "MISMATCH" in done.stdout:
            return f"{folder / SCRIPT} shows {content.what} without fuseport"
        last = (done.stderr.strip() or done.stdout.strip() or "it prints nothing").splitlines()[-1]
        reasons.append(f"{content.what} does not show it: {last}")
    if folder.exists():
        shutil.rmtree(folder)
    why = "; ".join(reasons) or "there is no file to run"
    return f"no script for {failure.job.runtime}, {failure.artifact}: {why}"


def _contents(finding: Finding, failure: Failure, scene: Scene) -> Iterable[_Content]:
    """What to try, the smallest first."""
    divergence = finding.diagnosis.divergence
    if finding.alone is not None and divergence is not None:
        yield _of_part(finding.alone, f"{divergence.op} alone")
    if failure.artifact != "model":
        yield _of_whole(failure, scene)


def _of_part(alone: Alone, what: str) -> _Content:
    names = alone.written.inputs
    assert names is not None
    return _Content(
        file=alone.written.file,
        inputs={of: alone.inputs[node] for node, of in names.items()},
        cotangents=alone.cotangents,
        truth={alone.name if alone.cotangents is not None else _only(alone): alone.truth},
        operators=alone.operators,
        what=what,
        runtime=alone.runtime,
    )


def _only(alone: Alone) -> str:
    return next(iter(alone.written.outputs.values()))


def _of_whole(failure: Failure, scene: Scene) -> _Content:
    job = failure.job
    inputs, cotangents = scene.tensors("forward" if job.way == "autograd" else job.program)
    with opened(scene.sample) as truth:
        known = {
            name: (truth(name), scene.sample.expected[name])
            for name in failure.tensors
            if name in scene.sample.expected and name not in scene.sample.omitted
        }
    return _Content(
        file=job.artifact,
        inputs=inputs,
        cotangents=cotangents if job.way == "autograd" else None,
        truth=known,
        operators=frozenset(scene.bundle.manifest["ops"]),
        what=f"the whole of {job.artifact.name}",
        runtime=job.runtime,
    )


def _write(content: _Content, folder: Path) -> None:
    runtime = content.runtime
    if runtime not in _KINDS:
        raise _CannotError(f"no script can run what {runtime} runs")
    if not content.truth:
        raise _CannotError("the truth of what failed is not here")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind = _KINDS[runtime]
    shutil.copyfile(content.file, folder / content.file.name)
    if kind.startswith("onnx"):
        _copy_weights(content.file, folder)
        used = _fused(content.file) if runtime == "onnxruntime+fused" else []
        found = [onnxruntime_library(*used)] if used else []
    else:
        found = _torch_libraries(content.operators)
    for library in found:
        shutil.copyfile(library, folder / library.name)
    tensors = {f"input/{name}": tensor for name, tensor in content.inputs.items()}
    tensors |= {f"cotangent/{name}": t for name, t in (content.cotangents or {}).items()}
    tensors |= {f"truth/{name}": truth for name, (truth, _) in content.truth.items()}
    save_file(apart({n: t.detach().contiguous() for n, t in tensors.items()}), folder / DATA)
    settings = {
        "KIND": kind,
        "FILE": content.file.name,
        "LIBRARIES": [library.name for library in found],
        "INPUTS": list(content.inputs),
        "COTANGENTS": None if content.cotangents is None else list(content.cotangents),
        "BOUNDS": {name: _bounds(name, *known) for name, known in content.truth.items()},
    }
    lines = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    text = TEXT.replace(WHAT, f"{content.what}, in {runtime}").replace(SETTINGS, f"{lines}\n")
    (folder / SCRIPT).write_text(text, encoding="utf-8")


def _bounds(name: str, truth: Tensor, expected: Expected) -> tuple[float, float, str]:
    """The largest error, the root mean square error, and the dtype."""
    # The rule is that of the report; a value of its own has the bound that any other has.
    rule = judge(name, truth.to(dtype_of(expected)), truth, expected)
    return _finite(rule.bound), _finite(rule.rms_bound), expected.dtype


def _finite(bound: float | None) -> float:
    return bound if bound is not None and math.isfinite(bound) else 0.0


def _copy_weights(file: Path, folder: Path) -> None:
    model = onnx.load(file, load_external_data=False)
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    places = {entry.value for entry in entries if entry.key == "location"}
    for place in places & {WEIGHTS}:
        shutil.copyfile(file.parent / place, folder / place)
    if others := places - {WEIGHTS}:
        raise _CannotError(f"{file.name} has weights in {', '.join(sorted(others))}")


def _fused(file: Path) -> list[str]:
    """The ops that the library has kernels for and the file has nodes of."""
    model = onnx.load(file, load_external_data=False)
    types = {node.op_type for node in model.graph.node}
    return [
        name
        for name, spec in OPS.items()
        if ort.bound(spec) and types & {o.name for o in spec.operators}
    ]


def _torch_libraries(operators: frozenset[str]) -> list[Path]:
    for spec in OPS.values():
        mine = operators & {o.qualified_name for o in spec.operators}
        if mine and implementation(spec) != "native" and spec.library is None:
            raise _CannotError(f"{min(mine)} is registered in Python, by code that needs fuseport")
    return libraries.find(Path("elsewhere"), operators) if operators else []


def _tried(folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", SCRIPT]
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _CannotError(f"the script takes more than {seconds:g} s") from error
