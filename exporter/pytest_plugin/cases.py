"""What the pytest plugin is made of, and imports only where a test is marked: its cases.

A case has the inputs of one job of a verification, what the runtime gave, and the rows on it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fuseport.exporter import api, runtimes
from fuseport.exporter.bundle import read_manifest
from fuseport.exporter.errors import FuseportError, Missing, UsageError
from fuseport.exporter.program import KINDS, Entry
from fuseport.exporter.verify import plan
from fuseport.exporter.verify.outputs import INDEX
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import FLOAT64, OWN_BACKWARD, Report, Row
from fuseport.exporter.verify.run import Limits
from fuseport.exporter.verify.sample import Sample, read_all
from fuseport.exporter.verify.tolerances import parsed

__all__ = ["ParityCase", "Verified", "Wanted", "jobs", "name", "wanted"]

_LISTED = 10
_WHOLE = "*"  # in a row: what speaks of all artifacts, cases or tensors


@dataclass(frozen=True)
class Wanted:
    """What a marker says; see `wanted`."""

    bundle: str
    runtimes: tuple[str, ...] | None = None
    programs: tuple[str, ...] | None = None
    model: str | None = None
    ops: str | None = None
    atol: tuple[str, ...] = ()
    rtol: tuple[str, ...] = ()
    strict: bool = False
    timeout: float = 900.0
    trust_native: tuple[str, ...] = ()


def wanted(
    bundle: str | Path,
    *,
    runtimes: str | Sequence[str] | None = None,
    programs: str | Sequence[str] | None = None,
    model: str | None = None,
    ops: str | None = None,
    atol: float | str | Sequence[float | str] | None = None,
    rtol: float | str | Sequence[float | str] | None = None,
    strict: bool = False,
    timeout: float = 900.0,
    trust_native: str | Sequence[str] | None = None,
) -> Wanted:
    """The arguments of `@pytest.mark.parity`, checked.

    Args:
        bundle: its folder, from pytest's root folder.
        runtimes: a name or several; None for all, of which those not installed are skipped.
        programs: `forward`, `gradient`, `step`; None for all.
        model: the user's own code, where the bundle came from it.
        ops: the user's own ops, where the bundle has some.
        atol: as of `fuseport verify`: a number, `"grad/*:1e-4"`, or several of these.
        rtol: the same.
        strict: whether what is unsupported fails, instead of being skipped.
        timeout: seconds for one job.
        trust_native: SHA-256 of a manifest that another user or machine wrote, whose TorchScript,
            `.pt2` and libraries may be loaded here; the message of a refusal says it.

    Raises:
        UsageError: a name is unknown, or a number cannot be.
    """
    chosen = None if runtimes is None else _several(runtimes)
    kinds = None if programs is None else _several(programs)
    for kind in kinds or ():
        if kind not in KINDS:
            raise UsageError(f"{kind} is not a program; there are: {', '.join(KINDS)}")
    tolerances = _several(atol), _several(rtol)
    parsed(*tolerances)
    trusted = _several(trust_native)
    return Wanted(
        os.fspath(bundle), chosen, kinds, model, ops, *tolerances, strict, timeout, trusted
    )


def jobs(wanted: Wanted, root: Path) -> list[Job]:
    """The items of a marked test: what a verification of its bundle does.

    Raises:
        UsageError: there is no such bundle or runtime, or nothing in it is for a runtime.
        CorruptInput: it is no bundle.
    """
    folder = root / wanted.bundle
    manifest, _ = read_manifest(folder)
    names: dict[Entry, list[str]] = {}
    for sample in read_all(folder / "samples"):
        if sample.refused is None:
            names.setdefault(sample.case.entry, []).append(sample.case.name)
    rebuilt = manifest["architecture"]["name"] != "user" or wanted.model is not None
    found: list[Job] = []
    for runtime in wanted.runtimes or runtimes.RUNTIMES:
        own = list(plan.jobs(folder, manifest, [runtime], names, rebuilt=rebuilt, forms=True))
        if wanted.runtimes is not None and not own:
            raise UsageError(f"{folder}: nothing in it is for the runtime {runtime}")
        found += (job for job in own if job.program in (wanted.programs or KINDS))
    if not found:
        raise UsageError(f"{folder}: nothing in it is of {', '.join(wanted.programs or KINDS)}")
    return found


def name(job: Job) -> str:
    """An item's, within the brackets: `onnxruntime-gradient.onnx-odd, transposed`."""
    model = runtimes.get(job.runtime).FORMAT is None
    artifact = "model" if model else job.artifact.name
    way = "" if job.way == "run" else f"-{job.way}"
    return f"{job.runtime}-{artifact}{way}-{job.case}"


@dataclass(frozen=True)
class ParityCase:
    """One artifact in one runtime on one case, which has been run.

    Attributes:
        runtime: its name.
        artifact: the file's name; `model` for the model itself.
        program: `forward`, `gradient` or `step`: what is compared.
        way: `run`, or `autograd` through a forward program; or, of either, the forms in which
            backward can be asked for, where each row is one of these.
        case: its name.
        bundle: the folder.
        inputs: by name.
        cotangents: by output; empty for a program that takes none.
        rows: of the report: one for each tensor, or one for all.
        unsupported: why it could not be run or judged; None if it was.
    """

    runtime: str
    artifact: str
    program: str
    way: str
    case: str
    bundle: Path
    inputs: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor]
    rows: tuple[Row, ...]
    unsupported: str | None
    _truth: Path
    _outputs: Path | None

    @property
    def truth(self) -> dict[str, Tensor]:
        """Outputs and gradients (`grad/<name>`) in float64, those stored at the export.

        Larger ones than 4 MiB are not; `check` compares these too.
        """
        return _tensors(self._truth, "truth/")

    def run(self) -> dict[str, Tensor]:
        """What the runtime gave at its first call, in a process of its own: outputs and gradients.

        Raises:
            AssertionError: it gave nothing, or failed.
        """
        if self._outputs is None:
            raise AssertionError(self._said([row for row in self.rows if row.verdict != "pass"]))
        return _tensors(self._outputs, "")

    def check(self) -> None:
        """That every tensor is within its bound, as `fuseport verify` judges.

        Raises:
            AssertionError: one is not, or nothing was compared; it lists the worst.
        """
        wrong = [row for row in self.rows if row.verdict != "pass"]
        if wrong:
            raise AssertionError(self._said(wrong))
        if not self.rows:
            raise AssertionError(f"{self._what()}: nothing was compared")

    def _what(self) -> str:
        way = "" if self.way == "run" else f", {self.way}"
        return f"{self.artifact} in {self.runtime}{way}, case {self.case!r}"

    def _said(self, wrong: Sequence[Row]) -> str:
        lines = Report("", "", {}, 0.0, tuple(wrong)).failures()
        more = [f"… and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        of = f"{len(wrong)} of {len(self.rows)} rows do not pass"
        return "\n  ".join([f"{self._what()}: {of}", *lines[:_LISTED], *more])


class Verified:
    """The verifications of a test session, each made once.

    Args:
        folder: gives a new folder for outputs.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._known: dict[Wanted, _Done | FuseportError] = {}

    def case(self, wanted: Wanted, job: Job, root: Path) -> ParityCase:
        """The case of a job, whose bundle is verified now if it has not been.

        Raises:
            FuseportError: the bundle cannot be verified; the same for all jobs of it.
        """
        key = replace(wanted, strict=False, programs=None)  # these choose among what comes of it
        if key not in self._known:
            try:
                self._known[key] = _verified(wanted, root, self._folder() / "outputs")
            except FuseportError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, FuseportError):
            raise known
        return _case(job, root / wanted.bundle, known)


@dataclass(frozen=True)
class _Done:
    report: Report
    samples: Mapping[str, Sample]
    first_calls: Mapping[tuple[str, ...], Path]


def _verified(wanted: Wanted, root: Path, outputs: Path) -> _Done:
    installed = None
    if wanted.runtimes is not None:
        # One that is not installed skips or fails its own items: it does not end the others.
        missing = {name: runtimes.get(name).missing() for name in wanted.runtimes}
        installed = [name for name, reason in missing.items() if reason is None]
        if not installed:
            raise Missing("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    with _within(root):  # the marker's paths are from there
        report = api.verify(
            wanted.bundle,
            runtime=installed,
            model=wanted.model,
            ops=wanted.ops,
            tolerance=parsed(wanted.atol, wanted.rtol),
            limits=Limits(wanted.timeout),
            trust_native=wanted.trust_native,
            save_outputs=outputs,
        )
    index = json.loads((outputs / INDEX).read_text(encoding="utf-8"))
    samples = read_all(root / wanted.bundle / "samples")
    return _Done(
        report,
        {sample.case.name: sample for sample in samples},
        {
            tuple(entry[key] for key in ("runtime", "artifact", "program", "way", "case")): outputs
            / entry["files"]["1"]["file"]
            for entry in index["answers"]
            if "1" in entry["files"]
        },
    )


def _case(job: Job, bundle: Path, done: _Done) -> ParityCase:
    artifact = "model" if runtimes.get(job.runtime).FORMAT is None else job.artifact.name
    sample = done.samples[job.case]
    rows = tuple(row for row in done.report.results if _speaks_of(row, job, artifact))
    unsupported = None
    if not rows:
        unsupported = runtimes.get(job.runtime).missing()
        if unsupported is None and job.way.endswith("forms"):
            unsupported = "nothing has a gradient"
    elif all(row.verdict == "unsupported" for row in rows):
        unsupported = rows[0].reason
    return ParityCase(
        job.runtime,
        artifact,
        job.program,
        job.way,
        job.case,
        bundle,
        _tensors(sample.file, "input/"),
        _tensors(sample.file, "cotangent/") if job.program == "gradient" else {},
        rows,
        unsupported,
        sample.file,
        done.first_calls.get(
            (job.runtime, job.artifact.name, job.program, job.way, job.case), None
        ),
    )


def _speaks_of(row: Row, job: Job, artifact: str) -> bool:
    """Whether a row is of a job; so is one of its whole runtime, and a truth that is in doubt."""
    if row.runtime == FLOAT64:
        return row.verdict != "pass" and row.case == job.case
    if row.runtime != job.runtime:
        return False
    if row.artifact == _WHOLE:
        return row.case in (_WHOLE, job.case)
    ways = (job.way, OWN_BACKWARD) if job.way.startswith("autograd") else (job.way,)
    here = (row.artifact, row.program, row.case) == (artifact, job.program, job.case)
    return here and row.way in ways


@contextmanager
def _within(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name.removeprefix(prefix): opened.get_tensor(name) for name in names}


def _several(given: Any) -> tuple[str, ...]:
    """One value or several, as texts."""
    if given is None:
        return ()
    values = [given] if isinstance(given, str | int | float) else given
    return tuple(map(str, values))
