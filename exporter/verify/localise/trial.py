"""Running what was written to look into an artifact, in the runtime that failed, in a child."""

import shutil
from collections.abc import Iterable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter.program import Program
from fuseport.exporter.runtimes._layouts import apart
from fuseport.exporter.verify.localise.written import Written
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.run import Limits, execute
from fuseport.exporter.verify.sample import Sample
from fuseport.exporter.verify.turns import waited

__all__ = ["Trials", "UnknownError"]

Tensors = Mapping[str, Tensor]


class UnknownError(Exception):
    """What was asked for cannot be known, of a runtime that gave no values for example; the message
    says why."""


@dataclass(frozen=True)
class Trials:
    """Runs files.

    Attributes:
        folder: to work in.
        programs: by kind, what a runtime is told; see `verify.subject.programs_of`.
        sample: of the case that failed.
        limits: of each child.
        call: which of the calls of a job to look at; the first, where all give the same.
    """

    folder: Path
    programs: Mapping[str, Mapping[str, Any]]
    sample: Sample
    limits: Limits
    call: int = 1
    _numbers: Any = field(default_factory=count)

    @property
    def device(self) -> str:
        """That runtimes compute on."""
        return str(next(iter(self.programs.values()))["device"])

    def fresh(self) -> Path:
        """A new empty folder."""
        folder = self.folder / f"trial{next(self._numbers)}"
        folder.mkdir()
        return folder

    def whole(self, runtime: str, kind: str, written: Written) -> dict[str, Tensor]:
        """The values of a whole artifact on the case, by node."""
        job = Job(runtime, written.file, kind, "run", self.sample.case.name)
        found = self.job(job, self.sample, wanted=set(written.outputs.values()))
        return _by_node(found, written)

    def part(
        self, runtime: str, written: Written, inputs: Tensors, *, optimised: bool = True
    ) -> dict[str, Tensor]:
        """The values of a part, by node.

        Args:
            runtime: to run it.
            written: it.
            inputs: by node; the part may need fewer.
            optimised: as of `job`.
        """
        assert written.inputs is not None
        named = {of: inputs[node] for node, of in written.inputs.items()}
        sample = self._sample(named, {})
        job = Job(runtime, written.file, "forward", "run", sample.case.name)
        outputs = dict.fromkeys(written.outputs.values(), "")
        found = self.job(job, sample, (named, outputs), optimised=optimised)
        return _by_node(found, written)

    def differentiated(
        self, runtime: str, file: Path, program: Program, inputs: Tensors, cotangents: Tensors
    ) -> dict[str, Tensor]:
        """Outputs and gradients of a forward program, by the runtime's autograd."""
        sample = self._sample(inputs, cotangents)
        job = Job(runtime, file, "gradient", "autograd", sample.case.name)
        outputs = {spec.name: spec.dtype for spec in program.outputs}
        return self.job(job, sample, (inputs, outputs))

    def job(
        self,
        job: Job,
        sample: Sample,
        signature: tuple[Iterable[str], Mapping[str, str]] | None = None,
        *,
        wanted: Set[str] | None = None,
        optimised: bool = True,
    ) -> dict[str, Tensor]:
        """What a job gives.

        Args:
            job: to do.
            sample: its inputs.
            signature: names of the file's inputs, and dtypes of its outputs by name, where they are
                not the program's.
            wanted: outputs to return; None for all.
            optimised: False for a runtime's own optimisations switched off.

        Raises:
            UnknownError: the runtime cannot, or died.
        """
        told = {kind: {**p, "optimised": optimised} for kind, p in self.programs.items()}
        if signature is not None:
            inputs, outputs = signature
            told["forward"]["inputs"] = [{"name": name} for name in inputs]
            told["forward"]["outputs"] = [{"name": n, "dtype": d} for n, d in outputs.items()]
        folder = self.fresh()
        answers = waited(execute([job], {job.case: sample}, lambda _: told, folder, self.limits))
        with closing(answers):
            answer = next(answers)
            if answer.status != "done" or not answer.calls:
                raise UnknownError(f"{job.runtime}: {answer.reason}")
            call = self.call if self.call in answer.calls else 1
            found = {n: t for n, t in answer.tensors(call) if wanted is None or n in wanted}
        shutil.rmtree(folder)
        return found

    def _sample(self, inputs: Tensors, cotangents: Tensors) -> Sample:
        file = self.fresh() / "inputs.safetensors"
        tensors = {f"input/{n}": t.contiguous() for n, t in inputs.items()}
        tensors |= {f"cotangent/{n}": t.contiguous() for n, t in cotangents.items()}
        save_file(apart(tensors), file)
        case = Case("alone", {}, "contiguous", 0)
        return replace(self.sample, case=case, file=file)


def _by_node(found: Tensors, written: Written) -> dict[str, Tensor]:
    lacking = [value for value in written.outputs.values() if value not in found]
    if lacking:
        raise UnknownError(f"the runtime gave no {lacking[0]}")
    return {node: found[value] for node, value in written.outputs.items()}
