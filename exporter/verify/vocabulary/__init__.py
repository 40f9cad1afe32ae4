"""The vocabulary suite: every plain operator, forward and gradient, through every runtime.

Each case is exported as a model is, by the product's own exporter, run by the product's own
runtimes, each in one child process for all cases, and judged against float64 as bundles are.
`fuseport cases check` runs it.
"""

import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from pathlib import Path

from fuseport.exporter import runtimes
from fuseport.exporter.describe import environment
from fuseport.exporter.errors import Missing, RuntimeCrash, UsageError
from fuseport.exporter.verify.compare import Verdict
from fuseport.exporter.verify.plan import Job, of_artifact
from fuseport.exporter.verify.report import Row
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Limits, execute, quick_starts
from fuseport.exporter.verify.turns import waited
from fuseport.exporter.verify.vocabulary.exceptions import applied
from fuseport.exporter.verify.vocabulary.report import PlainRow, VocabularyReport
from fuseport.exporter.verify.vocabulary.subject import Subject, alone, name_of, prepare
from fuseport.ops.vocabulary import CASES, OPERATORS
from fuseport.ops.vocabulary.case import PlainCase

__all__ = ["QUICK", "PlainRow", "VocabularyReport", "check", "chosen"]

QUICK = ("eager", "torchscript", "exported_program", "onnxruntime", "onnx_reference")
"""The runtimes that are taken unasked: the others compile, or start a process, for every case."""

_ORDER: tuple[Verdict, ...] = ("fail", "error", "unsupported", "pass")
_FEW = 8  # cases that are not worth processes of their own
_LIMITS = Limits(seconds=120.0)


def chosen(only: Sequence[str]) -> tuple[PlainCase, ...]:
    """The cases of operators, by name; all if none is named.

    Raises:
        UsageError: there is no operator of a name.
    """
    for name in only:
        if name not in OPERATORS:
            raise UsageError(f"{name} is not an operator; there are: {', '.join(OPERATORS)}")
    return tuple(case for case in CASES if not only or case.operator in only)


def check(
    cases: Sequence[PlainCase],
    *,
    runtime: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> VocabularyReport:
    """Run cases through runtimes, and judge what comes of them.

    Args:
        cases: of `fuseport.ops.vocabulary`.
        runtime: names; None for those of `QUICK` that are installed.
        seed: of all values.
        progress: told of each step.

    Raises:
        UsageError: there is no runtime of a name.
        Missing: a runtime that was named is not installed.
        RuntimeCrash: the exporter itself died.
    """
    begin = time.monotonic()
    rows: list[PlainRow] = []
    present: list[str] = []
    for name in dict.fromkeys(QUICK if runtime is None else runtime):
        reason = runtimes.get(name).missing()
        if reason is None:
            present.append(name)
        elif runtime is not None:
            raise Missing(f"{name}: {reason}")
        else:
            rows.append(PlainRow("*", "*", name, "*", "*", "unsupported", reason))
    found = (runtimes.get(name).FORMAT for name in present)
    wanted = [name for name in dict.fromkeys(found) if name is not None]
    folder = tempfile.TemporaryDirectory(prefix="fuseport-", ignore_cleanup_errors=True)
    with quick_starts(), folder as text:
        work = Path(text)
        subjects = _prepared(cases, work, wanted, seed, progress)
        with ThreadPoolExecutor(_processes()) as pool:
            progress(f"running {len(cases)} cases in {', '.join(present)}")
            for part in pool.map(partial(_run, subjects, work), present):
                rows += applied(iter(part))
    counts = {name: sum(c.operator == name for c in cases) for name in OPERATORS}
    return VocabularyReport(
        tuple(rows),
        {name: count for name, count in counts.items() if count},
        seed,
        environment(),
        time.monotonic() - begin,
    )


def _prepared(
    cases: Sequence[PlainCase],
    work: Path,
    wanted: Sequence[str],
    seed: int,
    progress: Callable[[str], None],
) -> list[Subject]:
    tasks = [(name_of(case), work / str(i), wanted, seed) for i, case in enumerate(cases)]
    for _, folder, _, _ in tasks:
        folder.mkdir()
    if len(tasks) <= _FEW:
        return [_task(task) for task in tasks]
    done: list[Subject] = []
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(_processes(), context, initializer=alone)
    try:
        for subject in pool.map(_task, tasks, chunksize=4):
            if not done or _operator(done[-1]) != _operator(subject):
                progress(f"exporting: {_operator(subject)}")
            done.append(subject)
    except BrokenProcessPool as error:
        raise RuntimeCrash(f"the exporter died at a case after {len(done)} others") from error
    finally:
        pool.shutdown(cancel_futures=True)  # as a context it would do them all after an interrupt
    return done


def _operator(subject: Subject) -> str:
    return subject.name.partition(": ")[0]


def _processes() -> int:
    return max(1, min(4, os.cpu_count() or 1))


def _task(task: tuple[str, Path, Sequence[str], int]) -> Subject:
    name, folder, wanted, seed = task
    case = next(case for case in CASES if name_of(case) == name)
    quiet = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return prepare(case, folder, wanted, seed)
    finally:
        logging.disable(quiet)


def _run(subjects: Sequence[Subject], work: Path, runtime: str) -> list[PlainRow]:
    """All jobs of one runtime: one child does them, and a new one the rest if it dies."""
    rows: list[PlainRow] = []
    jobs: list[Job] = []
    format_name = runtimes.get(runtime).FORMAT
    for subject in subjects:
        if format_name is None:
            jobs.append(Job(runtime, subject.weights, "forward", "run", subject.name))
            jobs.append(Job(runtime, subject.weights, "gradient", "autograd", subject.name))
            continue
        for kind in ("forward", "gradient"):
            file = subject.artifacts.get((format_name, kind))
            if file is None:
                reason = subject.refused[format_name, kind]
                rows.append(_row(subject.name, runtime, kind, "run", "unsupported", reason))
            else:
                jobs += of_artifact(runtime, file, kind, {"forward": [subject.name]})
    named = {subject.name: subject for subject in subjects}
    samples = {name: subject.sample for name, subject in named.items()}
    folder = work / runtime
    folder.mkdir()
    answers = execute(jobs, samples, lambda job: named[job.case].programs, folder, _LIMITS)
    with closing(waited(answers)) as given:
        for answer in given:
            subject = named[answer.job.case]
            parts = list(judged(answer, subject.sample, subject.programs["forward"], None))
            rows.append(_merged(answer.job, parts))
    return rows


def _merged(job: Job, parts: Sequence[Row]) -> PlainRow:
    """One row of those of a job's tensors, with the worst of them."""
    verdict = next((v for v in _ORDER if any(part.verdict == v for part in parts)), None)
    if verdict is None:
        return _row(job.case, job.runtime, job.program, job.way, "error", "nothing was compared")
    shares = [part.share for part in parts if part.share is not None]
    reasons = (
        part.reason if part.tensor == "*" else f"{part.tensor}: {part.reason}"
        for part in parts
        if part.verdict == verdict and part.reason
    )
    share = max(shares, default=None)
    return _row(job.case, job.runtime, job.program, job.way, verdict, next(reasons, None), share)


def _row(
    case: str,
    runtime: str,
    program: str,
    way: str,
    verdict: Verdict,
    reason: str | None,
    share: float | None = None,
) -> PlainRow:
    operator, _, name = case.partition(": ")
    return PlainRow(operator, name, runtime, program, way, verdict, reason, share=share)
