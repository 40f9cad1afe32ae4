"""A failure and all that is needed to look into it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from fuseport.exporter import models, runtimes
from fuseport.exporter.bundle import Bundle, trust
from fuseport.exporter.capture import capture
from fuseport.exporter.errors import Missing
from fuseport.exporter.program import Kind, Program, TensorSpec
from fuseport.exporter.runtimes._ops import register
from fuseport.exporter.verify.compare import Judgement, judge
from fuseport.exporter.verify.localise.trial import Trials, UnknownError
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.sample import Sample, opened

__all__ = ["Failure", "Scene", "captured"]


@dataclass(frozen=True)
class Failure:
    """A job whose results are wrong.

    Attributes:
        job: it.
        tensors: names of the outputs and gradients that are wrong.
        call: at which call of it.
    """

    job: Job
    tensors: tuple[str, ...]
    call: int = 1

    @property
    def artifact(self) -> str:
        """As in rows of a report."""
        of_model = runtimes.get(self.job.runtime).FORMAT is None
        return "model" if of_model else self.job.artifact.name


@dataclass(frozen=True)
class Scene:
    """What is known of the case that a job failed on.

    Attributes:
        bundle: it.
        programs: by kind, as captured from the model.
        sample: of the case.
        trials: to run things in.
        budget: bytes of values to look at in one round.
    """

    bundle: Bundle
    programs: Mapping[str, Program]
    sample: Sample
    trials: Trials
    budget: int

    def tensors(self, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The inputs of a program on the case, and the cotangents by output."""
        with safe_open(self.sample.file, "pt") as file:
            names = list(file.keys())
            cotangents = {
                name.removeprefix("cotangent/"): file.get_tensor(name)
                for name in names
                if name.startswith("cotangent/")
            }
            given = {f"cotangent_{name}": tensor for name, tensor in cotangents.items()}
            inputs = {
                spec.name: given[spec.name]
                if spec.name in given
                else file.get_tensor(f"input/{spec.name}")
                for spec in self.programs[kind].inputs
            }
        return inputs, cotangents

    def facts(self, artifact: Path) -> Mapping[str, Any]:
        """What the manifest says of an artifact; of one made elsewhere, that of the same format."""
        entries = self.bundle.manifest["artifacts"]
        found = [e for e in entries if e["file"] == artifact.name]
        found = found or [e for e in entries if e["format"].startswith("onnx")]
        return found[0] if found else {}

    def surplus(self, failure: Failure) -> tuple[str, ...]:
        """Those of the tensors which failed that the model does not give: gradients of what does
        not enter its outputs, for one."""
        given = {spec.name for program in self.programs.values() for spec in program.inputs}
        return tuple(n for n in failure.tensors if n not in {*self.sample.expected, *given})

    def absent(self, failure: Failure) -> tuple[str, ...]:
        """Those of the tensors which failed that the artifact does not give.

        Raises:
            UnknownError: it does not run.
        """
        given = self.trials.job(failure.job, self.sample)
        return tuple(name for name in failure.tensors if name not in given)

    def wrong(self, failure: Failure, results: Mapping[str, Tensor]) -> dict[str, Judgement]:
        """Those of the tensors which failed that are wrong in these results, too.

        Raises:
            UnknownError: none of them can be compared.
        """
        compared: dict[str, Judgement] = {}
        with opened(self.sample) as truth:
            for name in failure.tensors:
                known = self.sample.expected.get(name)
                if known is not None and name not in self.sample.omitted:
                    compared[name] = judge(name, results.get(name), truth(name), known, None)
                elif name in self.surplus(failure):
                    compared[name] = judge(name, results.get(name), None, None, None)
        if not compared:
            what = ", ".join(failure.tensors)
            raise UnknownError(f"there is no truth of {what} to hold its results against")
        return {name: found for name, found in compared.items() if found.verdict == "fail"}


def captured(bundle: Bundle, kind: str, code: str | None) -> dict[str, Program]:
    """The programs that a failure of one of this kind is looked into with.

    They are captured again from the model, or else taken from the bundle's `.pt2` files.

    Raises:
        Missing: neither is possible.
    """
    try:
        model = models.rebuild(bundle.manifest["architecture"], bundle.weights, code=code)
    except Missing:
        return _stored(bundle, kind)
    return {p.kind: p for p in capture(model, [cast(Kind, kind)], bundle.manifest["seed"])}


def _stored(bundle: Bundle, kind: str) -> dict[str, Program]:
    manifest = bundle.manifest
    files = {
        entry["program"]: bundle.folder / entry["file"]
        for entry in manifest["artifacts"]
        if entry["format"] == "exported_program"
    }
    if kind not in files or not trust.is_trusted(bundle.sha256):
        raise Missing(
            f"the {kind} program is neither in the model's code, which --model would name, nor in a"
            " .pt2 file of a bundle that this user has exported"
        )
    register({"ops": list(manifest["ops"])})
    found: dict[str, Program] = {}
    for name in {kind, "forward"} & set(files):
        said = manifest["programs"][name]
        found[name] = Program(
            cast(Kind, name),
            torch.export.load(files[name]),
            tuple(_spec(entry) for entry in said["inputs"]),
            tuple(_spec(entry) for entry in said["outputs"]),
            tuple(said["none"]),
        )
    return found


def _spec(entry: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(**{**entry, "dims": tuple(entry["dims"])})
