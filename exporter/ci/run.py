"""Export and verify each checkpoint of a `fuseport.toml`; what fails is an outcome of its own."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from fuseport.exporter import api, formats
from fuseport.exporter.availability import require
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.bundle.staging import write_whole
from fuseport.exporter.ci import expected, reuse
from fuseport.exporter.ci.config import Checkpoint, Config
from fuseport.exporter.ci.report import CiReport, Outcome
from fuseport.exporter.describe import environment
from fuseport.exporter.errors import FuseportError, StorageError, UsageError
from fuseport.exporter.models.given import parse_dynamic, parse_sizes, read_given
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import KINDS
from fuseport.exporter.verify.report import Report, Row
from fuseport.exporter.verify.run import Limits, quick_starts
from fuseport.ops.build import cache_folder

__all__ = ["chosen", "run", "write"]

Progress = Callable[[str], None]


def chosen(config: Config, names: Sequence[str]) -> tuple[Checkpoint, ...]:
    """The checkpoints of these names; all for none.

    Raises:
        UsageError: there is none of a name.
    """
    known = {str(checkpoint.name): checkpoint for checkpoint in config.checkpoint}
    for name in names:
        if name not in known:
            raise UsageError(f"{name} is not a checkpoint of the file; it has: {', '.join(known)}")
    return tuple(known[name] for name in known if not names or name in names)


def run(
    config: Config,
    file: Path,
    *,
    only: Sequence[str] = (),
    progress: Progress = lambda _: None,
    done: Callable[[Outcome], None] = lambda _: None,
) -> CiReport:
    """Export and verify the checkpoints, one after the other.

    Args:
        config: what the file says.
        file: its path.
        only: names of checkpoints; all if empty.
        progress: told of each step.
        done: told of each outcome as soon as it is known.

    Raises:
        UsageError: there is no checkpoint of a name.
    """
    begin = time.monotonic()
    outcomes = []
    with quick_starts():
        for checkpoint in chosen(config, only):
            outcomes.append(_outcome(checkpoint, file, progress))
            done(outcomes[-1])
    seconds = time.monotonic() - begin
    return CiReport(str(file), tuple(outcomes), environment(), seconds)


def write(outcome: Outcome, folder: Path) -> None:
    """Write a checkpoint's report into the folder of reports: JSON and HTML, and JUnit XML, which
    has expected failures as passes and mended ones as failures. Of one that has no report, JUnit
    XML with what ended it.

    Raises:
        OSError, StorageError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in (".json", ".html", ".xml"):
        # Of an earlier run: it would be taken for this one's.
        (folder / f"{outcome.name}{suffix}").unlink(missing_ok=True)
    if outcome.report is None or outcome.judged is None:
        reason = " · ".join((outcome.error or "no report", *outcome.details))
        row = Row("fuseport", None, "*", "*", "run", outcome.name, "*", "error", reason)
        found = Report(outcome.path, "", environment(), 0.0, (row,))
        write_whole(folder / f"{outcome.name}.xml", found.to_junit().encode())
        return
    faces = {
        ".json": outcome.report.to_json() + "\n",
        ".html": outcome.report.to_html(),
        ".xml": outcome.judged.to_junit(),
    }
    for suffix, text in faces.items():
        write_whole(folder / f"{outcome.name}{suffix}", text.encode())


def _outcome(checkpoint: Checkpoint, file: Path, progress: Progress) -> Outcome:
    name = str(checkpoint.name)
    folder = reuse.place(checkpoint, file)

    def told(message: str) -> None:
        progress(f"{name}: {message}")

    given, device = checkpoint.tolerances, checkpoint.device or "cpu"
    try:
        if not Path(checkpoint.path).exists():  # told of this one alone: the others are verified
            raise UsageError(f"{file}: path: there is no file or folder {checkpoint.path}")
        require(device)
        with _locked(folder):
            bundle, reused = _exported(checkpoint, folder, told)
            report = api.verify(
                folder,
                runtime=checkpoint.runtimes,
                model=checkpoint.model,
                ops=checkpoint.ops,
                tolerance=None if given is None else given.tolerances().fitting(bundle.tensors),
                seeds=range(checkpoint.seeds or 1),
                limits=_limits(checkpoint),
                jobs=None if checkpoint.limits is None else checkpoint.limits.jobs,
                device=device,
                progress=told,
            )
    except FuseportError as error:
        said, *details = (_by_keys(text) for text in (str(error), *error.details))
        return Outcome(name, checkpoint.path, error.exit_code, error=said, details=tuple(details))
    held = expected.hold(checkpoint.expected, report)
    judged = expected.excused(checkpoint.expected, report)
    code = judged.exit_code(strict=bool(checkpoint.strict))
    notes = tuple(dict.fromkeys((*bundle.manifest["notes"], *report.notes)))
    return Outcome(
        name, checkpoint.path, code, str(bundle.folder), reused, report, judged, held, notes
    )


def _by_keys(message: str) -> str:
    """With the file's keys where options of the command are named that are the same."""
    keys = {name.replace("_", "-") for name in Checkpoint.__dataclass_fields__}

    def key(match: re.Match[str]) -> str:
        return next((name for name in (match[1], f"{match[1]}s") if name in keys), match[0])

    return re.sub(r"--([a-z][a-z-]*)", key, message)


def _exported(checkpoint: Checkpoint, folder: Path, progress: Progress) -> tuple[Bundle, bool]:
    """The bundle, and whether it is of an earlier run."""
    made_by = reuse.key(checkpoint)
    known = reuse.recorded(folder, made_by)
    if known is not None:
        progress("exported by an earlier run, of the same")
        return known, True
    compiled = any(map(formats.compiled, checkpoint.formats or formats.default()))
    bundle = api.export(
        checkpoint.path,
        folder,
        weights=checkpoint.weights,
        adapter=checkpoint.adapter,
        model=checkpoint.model,
        ops=checkpoint.ops,
        inputs=parse_inputs(checkpoint.input_shapes) or None,
        shim=checkpoint.shim,
        given=None if checkpoint.inputs is None else read_given(Path(checkpoint.inputs)),
        dynamic=parse_dynamic(checkpoint.dynamic) if checkpoint.dynamic else None,
        sizes=None if checkpoint.size is None else parse_sizes(checkpoint.size),
        programs=[kind for kind in KINDS if kind in (checkpoint.programs or api.PROGRAMS)],
        format=checkpoint.formats,
        opset=checkpoint.opset,
        device=(checkpoint.device if compiled else None) or "cpu",
        dtype=checkpoint.dtype,
        seed=checkpoint.seed,
        force=True,
        progress=progress,
    )
    reuse.record(bundle, made_by)
    return bundle, False


def _limits(checkpoint: Checkpoint) -> Limits | None:
    given = checkpoint.limits
    if given is None:
        return None
    return Limits(given.timeout, None if given.memory is None else int(given.memory * 2**30))


def _locked(folder: Path) -> FileLock:
    """No other run of the same file exports to the folder while it is verified."""
    locks = cache_folder() / "ci" / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{locks}: cannot be written: {error.strerror}") from error
    return FileLock(locks / f"{os.path.abspath(folder).replace('/', '-')[-150:]}.lock")
