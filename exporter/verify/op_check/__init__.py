"""All checks of an op, derived from its `OpSpec`: what `fuseport ops check` runs.

A check yields trials, each on one case; a trial says what is wrong, or nothing. An op that raises
fails the trial. Memory that nobody writes reads as NaN meanwhile.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fuseport.exporter.describe import environment
from fuseport.exporter.errors import UsageError
from fuseport.exporter.program import one_line
from fuseport.exporter.verify.op_check import contract, forms, gradients, nodes, programs
from fuseport.exporter.verify.op_check.report import OpReport, OpRow
from fuseport.exporter.verify.op_check.subject import Check, Refused, Subject, Unsupported, sample
from fuseport.ops import added, registration
from fuseport.ops.spec import OpSpec

__all__ = [
    "CHECKS",
    "LOWERED",
    "SLOW",
    "OpReport",
    "OpRow",
    "check",
    "first_failure",
    "rows",
    "surroundings",
    "wanted_checks",
]

CHECKS: Mapping[str, Check] = {
    "third call": contract.third_call,
    "value": gradients.value,
    "backward": gradients.backward,
    "backward forms": forms.backward_forms,
    "gradcheck": gradients.gradcheck,
    "double backward": gradients.double_backward,
    "fake": contract.fake,
    "inputs": contract.inputs,
    "threads": contract.threads,
    "opcheck": contract.opcheck,
    "torchscript": programs.torchscript,
    "export": programs.export,
    "onnx": nodes.bodies,
    "onnx native": nodes.native,
    "onnxruntime+fused": nodes.fused,
    "torch.compile": programs.compiled,
    "aot_inductor": programs.aot_inductor,
}
"""Every check, by name, in the order in which they run."""

LOWERED = ("onnx", "onnx native", "onnxruntime+fused")
"""Those that run what an op is lowered to."""

SLOW = ("torch.compile", "aot_inductor")
"""Those that compile, which takes a minute each."""

_FAILURES = 5  # that a row keeps


def check(
    specs: Sequence[OpSpec],
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    cases: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> OpReport:
    """Check ops.

    Args:
        specs: of the ops; they need not be among `fuseport.ops.OPS`.
        only: the checks to make, by name; all if empty.
        quick: leave out those of `SLOW`, unless `only` names them.
        cases: how many of each operator's to take, drawn with the seed; None for all.
        seed: of values and of the sample.
        progress: told of each step.

    Raises:
        UsageError: there is no check of a name.
    """
    names = wanted_checks(only, quick)
    begin = time.monotonic()
    found: list[OpRow] = []
    implementations: dict[str, str] = {}
    for spec in specs:
        with added(specs):
            found += rows(
                spec,
                names,
                cases=cases,
                seed=seed,
                progress=progress,
                registered=implementations.__setitem__,
            )
    return OpReport(tuple(found), implementations, seed, environment(), time.monotonic() - begin)


def wanted_checks(only: Sequence[str], quick: bool) -> list[str]:
    """The names of the checks to make, in their order; see `check`.

    Raises:
        UsageError: there is no check of a name.
    """
    for name in only:
        if name not in CHECKS:
            raise UsageError(f"{name} is not a check; there are: {', '.join(CHECKS)}")
    return [n for n in CHECKS if (n in only if only else not (quick and n in SLOW))]


def rows(
    spec: OpSpec,
    names: Sequence[str],
    *,
    cases: int | None,
    seed: int,
    progress: Callable[[str], None],
    registered: Callable[[str, str], None],
) -> Iterator[OpRow]:
    """The rows of one op, each as soon as it is known.

    Args:
        spec: of the op, which is among `fuseport.ops.OPS`.
        names: of the checks to make.
        cases: as in `check`, like `seed` and `progress`.
        seed: of values and of the sample.
        progress: told of each step.
        registered: told the op's name and its implementation.
    """
    progress(f"{spec.name}: registering, compiling if need be")
    registered(spec.name, registration.ensure(spec))
    subject = Subject(spec, sample(spec.cases, cases, seed), seed)
    for name in names:
        progress(f"{spec.name}: {name}")
        yield _row(subject, name)


def _row(subject: Subject, name: str) -> OpRow:
    begin = time.monotonic()
    trials, failures, unsupported = 0, [], None
    with surroundings():
        try:
            for failure in _tried(subject, name):
                trials += 1
                if failure is not None:
                    failures.append(failure)
        except Unsupported as error:
            unsupported = str(error)
        except Exception as error:  # so can its cases
            failures.append(f"making its cases raises {one_line(error)}")
    seconds = round(time.monotonic() - begin, 3)

    def row(verdict: str, reason: str | None) -> OpRow:
        kept = tuple(failures[:_FAILURES])
        return OpRow(subject.spec.name, name, verdict, reason, trials, kept, seconds)  # type: ignore[arg-type]

    if failures:
        count = f" ({len(failures)} of {trials} trials fail)" if len(failures) > 1 else ""
        return row("fail", failures[0] + count)
    if unsupported is not None:
        return row("unsupported", unsupported)
    if not trials:
        return row("error", "there is no case that it could be tried on")
    return row("pass", None)


def first_failure(subject: Subject, names: Sequence[str]) -> tuple[str, str] | None:
    """The first check of those named that fails, and its first trial that does; None if none.

    Nothing is tried after it.
    """
    with surroundings():
        for name in names:
            try:
                failure = next(filter(None, _tried(subject, name)), None)
                if failure is not None:
                    return name, failure
            except Unsupported:
                continue
            except Exception as error:  # so can its cases
                return name, f"making its cases raises {one_line(error)}"
    return None


def _tried(subject: Subject, name: str) -> Iterator[str | None]:
    """What fails in each trial of a check, None where nothing does; what an op refuses is none."""
    for where, trial in CHECKS[name](subject):
        try:
            reason = trial()
        except Refused:
            continue
        except Exception as error:  # an op under check can raise anything
            reason = f"raises {one_line(error)}"
        yield None if reason is None else f"{where}: {reason}"


@contextmanager
def surroundings() -> Iterator[None]:
    """Uninitialised memory is NaN, torch's own warnings are quiet; restores both."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    quiet = logging.root.manager.disable
    torch.use_deterministic_algorithms(True, warn_only=True)
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        logging.disable(quiet)
