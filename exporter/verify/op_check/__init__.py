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
from fuseport.exporter.verify.op_check import contract, gradients, nodes, programs
from fuseport.exporter.verify.op_check.report import OpReport, OpRow
from fuseport.exporter.verify.op_check.subject import Check, Refused, Subject, Unsupported, sample
from fuseport.ops import OPS, registration
from fuseport.ops.spec import OpSpec

__all__ = ["CHECKS", "SLOW", "OpReport", "OpRow", "check"]

CHECKS: Mapping[str, Check] = {
    "third call": contract.third_call,
    "value": gradients.value,
    "backward": gradients.backward,
    "gradcheck": gradients.gradcheck,
    "double backward": gradients.double_backward,
    "fake": contract.fake,
    "inputs": contract.inputs,
    "threads": contract.threads,
    "opcheck": contract.opcheck,
    "torchscript": programs.torchscript,
    "export": programs.export,
    "onnx": nodes.bodies,
    "onnxruntime+fused": nodes.fused,
    "torch.compile": programs.compiled,
    "aot_inductor": programs.aot_inductor,
}
"""Every check, by name, in the order in which they run."""

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
    for name in only:
        if name not in CHECKS:
            raise UsageError(f"{name} is not a check; there are: {', '.join(CHECKS)}")
    wanted = [n for n in CHECKS if (n in only if only else not (quick and n in SLOW))]
    begin = time.monotonic()
    rows: list[OpRow] = []
    implementations: dict[str, str] = {}
    own = {spec.name: spec for spec in specs}
    for spec in specs:
        progress(f"{spec.name}: registering, compiling if need be")
        implementations[spec.name] = registration.ensure(spec)
        chosen = sample(spec.cases, cases, seed)
        subject = Subject(spec, chosen, seed, tuple({**OPS, **own}.values()))
        for name in wanted:
            progress(f"{spec.name}: {name}")
            rows.append(_row(subject, name))
    return OpReport(tuple(rows), implementations, seed, environment(), time.monotonic() - begin)


def _row(subject: Subject, name: str) -> OpRow:
    begin = time.monotonic()
    trials, failures, unsupported = 0, [], None
    with _surroundings():
        try:
            for where, trial in CHECKS[name](subject):
                try:
                    reason = trial()
                except Refused:
                    continue
                except Exception as error:  # an op under check can raise anything
                    reason = f"raises {one_line(error)}"
                trials += 1
                if reason is not None:
                    failures.append(f"{where}: {reason}")
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


@contextmanager
def _surroundings() -> Iterator[None]:
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
