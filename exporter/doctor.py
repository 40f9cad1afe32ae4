"""What is here, what is missing, and how to get it: the facts behind `fuseport doctor`.

Nothing is imported before it is looked at, so that a missing or broken package is a finding.
"""

import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import fuseport

if TYPE_CHECKING:
    from fuseport.ops.build import Status as Found
    from fuseport.ops.spec import OpSpec

__all__ = ["Check", "Diagnosis", "Status", "diagnose"]

Status = Literal["ok", "missing", "warning"]
"""`missing`: absent, broken or too old. `warning`: it works, but not as well as it could."""

_FREE_BYTES = 200 * 2**20  # what libraries of a few torch versions take


@dataclass(frozen=True)
class Check:
    """What was found in one place.

    Attributes:
        name: what was looked for.
        status: whether it can be used.
        found: version and place, or the reason why it cannot be used.
        advice: what to do; "" where there is nothing to do.
        required: fuseport cannot work without it.
    """

    name: str
    status: Status
    found: str
    advice: str
    required: bool


@dataclass(frozen=True)
class Diagnosis:
    """All that was found on this machine, in the order in which one thing builds on another."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether all that fuseport cannot work without is there."""
        return not any(check.required and check.status == "missing" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        checks = [asdict(check) for check in self.checks]
        return {"schema": "fuseport.diagnosis/1", "ok": self.ok, "checks": checks}

    def lines(self) -> list[str]:
        """The same as text: a line for each check, advice on a line of its own below, once for
        those in a row that have the same."""
        width = max((len(check.name) for check in self.checks), default=0)
        after = [*(check.advice for check in self.checks[1:]), ""]
        lines = []
        for check, following in zip(self.checks, after, strict=True):
            absent = check.status == "missing" and not check.required
            status = "optional" if absent else check.status
            lines.append(f"{status:<8}  {check.name:<{width}}  {check.found}")
            if check.advice and check.advice != following:
                lines.append(" " * (width + 12) + check.advice)
        return lines


def diagnose() -> Diagnosis:
    """Look for everything that fuseport uses; it raises nothing, whatever is missing or broken."""
    return Diagnosis(tuple(probe.check() for probe in _probes()))


@dataclass(frozen=True)
class _Finding:
    found: str
    status: Status = "ok"
    advice: str = ""


@dataclass(frozen=True)
class _Probe:
    """Looks for one thing: `look` finds it or raises, `install` is what to do then."""

    name: str
    look: Callable[[], _Finding]
    install: str
    required: bool = True

    def check(self) -> Check:
        try:
            finding = self.look()
        except ModuleNotFoundError as error:
            finding = _Finding(f"not installed: {error.name}", "missing")
        except Exception as error:  # a broken package raises anything when it is imported
            reason = " ".join(str(error).split())[:300]
            finding = _Finding(f"it fails: {type(error).__name__}: {reason}", "missing")
        advice = finding.advice or (self.install if finding.status == "missing" else "")
        return Check(self.name, finding.status, finding.found, advice, self.required)


def _probes() -> Iterator[_Probe]:
    optional = partial(_Probe, required=False)
    yield _Probe("fuseport", _fuseport, "pip install fuseport")
    yield _Probe("Python", _python, "install Python 3.11 or later")
    yield _Probe("torch", _torch, _install("torch"))
    yield optional("C++ compiler", _compiler, _COMPILER_ADVICE)
    yield from _op_probes()
    yield optional("cache folder", _cache_folder, "install torch first")
    yield _Probe("onnx", partial(_package, "onnx"), _install("onnx"))
    yield _Probe("onnxscript", partial(_package, "onnxscript"), _install("onnxscript"))
    yield _Probe(
        "ONNX Runtime",
        _onnxruntime,
        "pip install --force-reinstall onnxruntime-gpu (or onnxruntime)",
    )
    yield optional("fused in ONNX Runtime", _fused, "install torch first")
    yield optional("confined runtimes", _confined, _CONFINED_ADVICE)
    yield optional("CUDA GPU", _gpu, "not needed: without one, all runs on the CPU")
    yield optional(
        "transformers",
        partial(_package, "transformers"),
        "for Hugging Face folders: pip install 'fuseport[huggingface]'",
    )


_COMPILER_ADVICE = (
    "without one, ops run in plain torch, slowly: install g++ or clang++ (Debian, Ubuntu: "
    "apt install g++; macOS: xcode-select --install), or set CXX"
)
_CONFINED_ADVICE = (
    "artifacts run in children with your rights: do not trust those of others; Linux 5.13 or later "
    "confines them, unless Landlock is switched off"
)
_CPU_ADVICE = (
    "not needed; a torch without CUDA is gigabytes smaller: pytorch.org, Get started, names the "
    "index of CPU wheels, which pip takes in PIP_EXTRA_INDEX_URL"
)


def _requirements() -> dict[str, SpecifierSet]:
    """The versions that fuseport's own metadata asks for, by package, and of `python`."""
    try:
        declared = metadata.metadata("fuseport")
    except metadata.PackageNotFoundError:
        return {}
    texts = [Requirement(text) for text in declared.get_all("Requires-Dist") or []]
    versions = {str(canonicalize_name(r.name)): r.specifier for r in texts}
    return {**versions, "python": SpecifierSet(declared["Requires-Python"])}


def _install(name: str) -> str:
    return f"pip install '{name}{_requirements().get(name, '')}'"


def _judge(name: str, version: str, found: str) -> _Finding:
    """The finding for a version: too old is as good as missing, too new is untested."""
    allowed = _requirements().get(name, SpecifierSet())
    if allowed.contains(version, prereleases=True):
        return _Finding(found)
    floors = [s for s in allowed if s.operator in (">", ">=")]
    if all(floor.contains(version, prereleases=True) for floor in floors):
        return _Finding(found, "warning", f"fuseport is not tested with it, but with {allowed}")
    return _Finding(f"{found}: too old, {allowed} is needed", "missing")


def _fuseport() -> _Finding:
    found = f"{fuseport.__version__} in {Path(fuseport.__file__).parent}"
    if _requirements():
        return _Finding(found)
    return _Finding(
        found, "warning", "it is not installed, so versions are not checked: pip install -e ."
    )


def _python() -> _Finding:
    version = platform.python_version()
    return _judge("python", version, f"{version} at {sys.executable}")


def _package(name: str) -> _Finding:
    version = str(importlib.import_module(name).__version__)
    return _judge(name, version, version)


def _torch() -> _Finding:
    import torch

    built = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return _judge("torch", torch.__version__, f"{torch.__version__}, built {built}")


def _compiler() -> _Finding:
    chosen = shlex.split(os.environ.get("CXX", ""))
    names = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]  # as ops.build takes them
    command = next((name for name in names if shutil.which(name[0])), None)
    if command is None:
        tried = ", ".join(name[0] for name in names)
        return _Finding(f"none on PATH: {tried}", "missing")
    # A compiler alone does not do: its standard library is a package of its own on some systems.
    done = subprocess.run(
        [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input="#include <vector>\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[0]
        return _Finding(f"{shlex.join(command)} compiles no C++20: {reason}", "missing")
    version = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return _Finding((version.stdout.splitlines() or [shlex.join(command)])[0])


def _op_probes() -> Iterator[_Probe]:
    try:
        from fuseport.ops import OPS
    except Exception:  # whatever is wrong: the probe imports it again, and tells
        yield _Probe("ops", partial(_package, "fuseport.ops"), "install torch first")
        return
    for name, spec in OPS.items():
        yield _Probe(f"op {name}", partial(_op, spec), "", required=False)
        if _on_cuda(spec):
            yield _Probe(f"op {name} on CUDA", partial(_op_on_cuda, spec), "", required=False)


def _op(spec: "OpSpec") -> _Finding:
    from fuseport.ops import build, registration

    if os.environ.get("FUSEPORT_NATIVE") == "0":
        return _Finding(
            "runs in plain torch", "warning", "FUSEPORT_NATIVE=0 asks for that: unset it"
        )
    if spec.library is None and not spec.has("torch.cpp"):
        return _Finding("plain torch: there are no kernels to compile")
    status = build.status(spec)
    if status.state == "built" and registration.implementation(spec) == "reference":
        return _Finding(
            f"runs in plain torch: {status.detail} cannot be loaded",
            "warning",
            "delete that file, so that it is compiled again",
        )
    return _of_library(status)


def _of_library(status: "Found", where: str = "") -> _Finding:
    if status.state == "unavailable":
        return _Finding(f"runs in plain torch{where}, slowly", "warning", status.detail)
    said = "compiled" if status.state == "built" else "not compiled yet"
    return _Finding(f"{said}: {status.detail}")


def _on_cuda(spec: "OpSpec") -> bool:
    from fuseport.ops import build, cuda

    try:
        return cuda.wanted(spec)
    except build.BuildError:
        return True  # GPUs are named in a way that is none, as its status tells


def _op_on_cuda(spec: "OpSpec") -> _Finding:
    from fuseport.ops import cuda

    return _of_library(cuda.status(spec), " there")


def _cache_folder() -> _Finding:
    from fuseport.ops.build import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    advice = "set FUSEPORT_CACHE to a folder that can be written to"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return _Finding(f"{folder}: {existing} cannot be written to", "warning", advice)
    free = shutil.disk_usage(existing).free
    if free < _FREE_BYTES:
        return _Finding(f"{folder}: only {free >> 20} MiB are free", "warning", advice)
    return _Finding(f"{folder}, {free / 2**30:.1f} GiB free")


def _onnxruntime() -> _Finding:
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    # Packages for other hardware, with names of their own, bring the same module.
    packages = sorted(set(metadata.packages_distributions().get("onnxruntime", ())))
    version = str(onnxruntime.__version__)
    origin = " and ".join(packages) or str(onnxruntime.__file__)
    found = f"{version} from {origin}, built with {', '.join(providers)}"
    remove = f"pip uninstall -y {' '.join(packages or ['onnxruntime'])}, then pip install"
    if len(packages) > 1:
        keep = "onnxruntime-gpu" if "onnxruntime-gpu" in packages else packages[0]
        return _Finding(found, "warning", f"they overwrite each other: {remove} {keep}")
    if "CUDAExecutionProvider" not in providers and _gpus():
        return _Finding(found, "warning", f"it cannot use the GPU: {remove} onnxruntime-gpu")
    return _judge("onnxruntime-gpu", version, found)


def _fused() -> _Finding:
    from fuseport.ops import OPS, ort

    status = ort.status(OPS.values())
    if status.state == "unavailable":
        return _Finding("nodes of ops run their function bodies, slowly", "missing", status.detail)
    if status.state == "buildable":
        return _Finding(f"not compiled yet: {status.detail}; headers in {ort.headers()}")
    return _Finding(f"compiled: {status.detail}")


def _confined() -> _Finding:
    from fuseport.exporter.child.confined import available

    parts = available()
    if not all(parts.values()):
        lacking = ", ".join(part for part, there in parts.items() if not there)
        return _Finding(f"not of {lacking}", "warning", _CONFINED_ADVICE)
    return _Finding("they write to their own folder alone, and have no network")


def _gpus() -> list[str]:
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.cuda.get_device_name(index) for index in range(count)]
    except Exception:  # the check of torch tells
        return []


def _gpu() -> _Finding:
    if gpus := _gpus():
        return _Finding(", ".join(gpus))
    import torch

    return _Finding("none that torch can use", "missing", _CPU_ADVICE if torch.version.cuda else "")
