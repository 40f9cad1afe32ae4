"""The op's part of the catalogue: which mutants an op has, and whether its checks see them."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch

from fuseport.exporter.verify.mutants import onnx_edits
from fuseport.exporter.verify.mutants.catalogue import CATALOGUE, OWN_FORWARD, OWN_GRADIENT
from fuseport.exporter.verify.mutants.kinds import Mutant, seen
from fuseport.exporter.verify.mutants.planting import planted
from fuseport.exporter.verify.mutants.report import Clean, Planted
from fuseport.exporter.verify.op_check import LOWERED, first_failure, rows, surroundings
from fuseport.exporter.verify.op_check.gradients import Standard, standard
from fuseport.exporter.verify.op_check.subject import (
    Point,
    Subject,
    cotangents,
    differentiated,
    outputs,
    points,
    same_bits,
    tensors,
)
from fuseport.ops.spec import Case, Operator, OpSpec

__all__ = ["attempt", "clean", "mutants"]

_OPSET = 20


def mutants(spec: OpSpec, seed: int = 0, *, everywhere: bool = True) -> tuple[Mutant, ...]:
    """The mutants of an op.

    Args:
        spec: of the op.
        seed: of the places drawn.
        everywhere: each kind in every place; in one place of the op, if not.
    """
    found: list[Mutant] = []
    kinds = [kind for kind in CATALOGUE if kind.places is not None]
    for facts in seen(spec, seed):
        for kind in kinds:
            of_gradient = kind.where == "gradient" and kind.key == "CPU"
            if kind.where != "fake" and of_gradient != facts.is_gradient:
                continue
            assert kind.places is not None
            name = facts.operator.name
            found += (Mutant(spec.name, kind, name, p, change) for p, change in kind.places(facts))
    if not everywhere:
        found = list(_one_of_each(found, seed))
    for bug in spec.bugs:
        backward = bug.operator in {operator.backward for operator in spec.operators}
        own = OWN_GRADIENT if backward else OWN_FORWARD
        kind = replace(own, name=bug.name, description=bug.description, source=bug.source)
        found.append(Mutant(spec.name, kind, bug.operator, "its own", bug.run))
    return (*found, *onnx_edits.bodies(spec, _OPSET, seed, everywhere))


def attempt(spec: OpSpec, mutant: Mutant, names: Sequence[str], seed: int = 0) -> Planted:
    """Plant a mutant, make checks until one sees it, and take it out again.

    Args:
        spec: of the op, which is registered.
        mutant: of the op.
        names: of the checks; those that are there to see its kind are made first.
        seed: of values.
    """
    if mutant.kind.where == "lowering":
        names = [n for n in names if n in LOWERED]  # the others never meet it
    ordered = [n for n in mutant.kind.checks if n in names]
    ordered += [n for n in names if n not in ordered]
    cases = _cases(spec, mutant)
    told = (why for pattern, why in spec.no_bugs.items() if fnmatchcase(mutant.label, pattern))
    same = next(told, None)
    with planted(spec, mutant) as changed:
        # Most show on the smallest cases, in one dtype, by what is there to see them.
        likely = [n for n in ordered if n in mutant.kind.checks]
        if same is not None and likely:
            ordered = likely  # what none of these sees, in any case, may be said to be no bug
        failure = first_failure(Subject(changed, _small_first(cases), seed), likely)
        failure = failure or first_failure(Subject(changed, cases, seed), ordered)
    reason = None
    if failure is None and same is None:
        reason = _explained(spec, mutant, cases, seed)
    return Planted(
        mutant.op,
        mutant.kind.name,
        mutant.kind.where,
        mutant.operator,
        mutant.place,
        None if failure is None else failure[0],
        reason if failure is None else failure[1],
        same,
    )


def clean(
    spec: OpSpec,
    names: Sequence[str],
    seeds: Sequence[int],
    dtypes: Sequence[torch.dtype],
    cases: int,
    progress: Callable[[str], None] = lambda message: None,
) -> Iterator[Clean]:
    """Checks of an op as it is, which have to pass: op × dtypes × seeds × checks.

    Args:
        spec: of the op.
        names: of the checks.
        seeds: of the values, and of the cases drawn.
        dtypes: each by itself; a check made in another dtype alone is not run for these.
        cases: how many of each operator's.
        progress: told of each step.
    """
    for dtype in dtypes:
        own = tuple(replace(case, dtypes=(dtype,)) for case in spec.cases if dtype in case.dtypes)
        if not own:
            continue
        for seed in seeds:
            found = rows(
                replace(spec, cases=own),
                names,
                cases=cases,
                seed=seed,
                progress=progress,
                registered=lambda op, how: None,
            )
            for row in found:
                if row.trials:  # a check that has nothing to try in this dtype is no run
                    kind = str(dtype).removeprefix("torch.")
                    alarm = None if row.verdict in ("pass", "unsupported") else row.reason
                    yield Clean(spec.name, row.check, kind, seed, row.trials, alarm)


def _one_of_each(found: Sequence[Mutant], seed: int) -> Iterator[Mutant]:
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in found:
        by_kind.setdefault(mutant.kind.name, []).append(mutant)
    for name, places in by_kind.items():
        yield random.Random(f"{seed} {name}").choice(places)


def _cases(spec: OpSpec, mutant: Mutant) -> tuple[Case, ...]:
    """Those that call the operator that is changed; the others never meet it.

    Which of them meet a function is not known beforehand: of each operator the first, then the
    second and so on.
    """
    if mutant.kind.where == "lowering":
        by_operator: dict[str, list[Case]] = {}
        for case in spec.cases:
            by_operator.setdefault(case.operator, []).append(case)
        turns = itertools.zip_longest(*by_operator.values())
        return tuple(case for turn in turns for case in turn if case is not None)
    calling = {o.name for o in spec.operators if mutant.operator in (o.name, o.backward)}
    return tuple(case for case in spec.cases if case.operator in calling)


def _small_first(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases in float32, or else their first dtype, by the size of their inputs."""

    def elements(case: Case) -> int:
        return sum(t.numel() for t in tensors(case.make(case.dtypes[0], 0)).values())

    return tuple(
        replace(case, dtypes=(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0],))
        for case in sorted(cases, key=elements)
    )


def _explained(spec: OpSpec, mutant: Mutant, cases: tuple[Case, ...], seed: int) -> str:
    """Why nothing is seen of a mutant: how near to its bound it comes, where it comes nearest."""
    if mutant.kind.where not in ("forward", "gradient"):
        return "no case shows it"
    subject = Subject(spec, cases, seed)
    worst, told, moved = 0.0, "", False
    with surroundings():
        for point in points(subject, layouts=True):
            operator = subject.forward(point.case)
            with suppress(ValueError):  # a layout of ours that the op refuses
                share, words, differs = _share(subject, spec, mutant, operator, point)
                moved |= differs
                if share > worst:
                    worst, told = share, f"{words} ({point})"
    if not moved:
        return "it gives the bits of the right one in every case"
    return f"nearest to its bound, {worst:.2f} of it: {told}"


def _share(
    subject: Subject, spec: OpSpec, mutant: Mutant, operator: Operator, point: Point
) -> tuple[float, str, bool]:
    given = point.inputs()
    seeds = cotangents(subject, operator, given, "as it is") if operator.backward else None
    right: Standard = standard(subject, operator, given, seeds)
    compute = (
        partial(differentiated, subject, operator, operator, given, seeds)
        if seeds is not None
        else lambda: dict(zip(operator.outputs, outputs(operator, given), strict=True))
    )
    was = compute()
    with planted(spec, mutant):
        found = compute()
    differs = any(
        (t is None) != (was[n] is None) or (t is not None and not same_bits(t, was[n]))  # type: ignore[arg-type]
        for n, t in found.items()
    )
    return (*right.closest(found), differs)
