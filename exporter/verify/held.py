"""Sizes that torch excluded in the capture, tried: does the program give there what the model does?

Most of what torch takes for granted of sizes is for the sake of a choice that makes no difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fuseport.exporter.models.model import Model, at, example
from fuseport.exporter.program import Program, entry_of
from fuseport.exporter.program.conditions import (
    admits,
    beyond,
    forget,
    places,
    summarised,
    violated,
)
from fuseport.exporter.program.refusing import seen
from fuseport.exporter.program.rounding import close
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.verify import plan
from fuseport.exporter.verify.plan import Case
from fuseport.exporter.verify.truth import session

__all__ = ["planned"]

_LIMITS = 4  # of one dimension that are tried
_AFFORDABLE = 4096  # a size that models are tried at
_NEAR = 16  # how far from the export's are sizes next to them


def planned(
    model: Model, captured: Sequence[Program], seed: int
) -> tuple[list[Program], list[Case], dict[str, dict[str, list[str]]], list[str]]:
    """What is to be compared, at sizes for which the programs hold.

    Args:
        model: that the programs are of.
        captured: its programs.
        seed: of the first case.

    Returns:
        The programs, with what they require of sizes; the cases of all entries; what the manifest
        has of an entry's requirements; and a sentence on each case that is left out, and on these.
    """
    programs = {program.kind: program for program in captured}
    cases: list[Case] = []
    conditions: dict[str, dict[str, list[str]]] = {}
    notes: list[str] = []
    for program in captured:
        if program.kind == "gradient":  # which takes the forward program's inputs
            continue
        entry = at(model, program.kind)
        grows = [name for name in entry.sizes if name not in model.sizes]
        wanted = plan.cases(
            entry.sizes,
            seed,
            program.kind,
            given=entry.given is not None,
            masks=[spec.name for spec in entry.inputs if spec.mask],
            grows=grows,
        )
        of_entry = [p for p in captured if entry_of(p.kind) == program.kind]
        _relieve(entry, of_entry, wanted)
        kept, dropped = plan.admitted(wanted, partial(admits, program))
        cases += kept
        notes += dropped
        asked = [*(case.sizes for case in wanted), *plan.far(entry.sizes)]
        wrong = [condition for sizes in asked for condition in violated(program, sizes)]
        if wrong:
            checked, unchecked = seen(wrong)
            programs |= {p.kind: replace(p, requires=checked) for p in of_entry}
            found = {"conditions": summarised(wrong), "unchecked": summarised(unchecked)}
            conditions[program.kind] = {name: words for name, words in found.items() if words}
            where = dict.fromkeys(place for sizes in asked for place in places(program, sizes))
            notes.append(plan.conditional(program.kind, conditions[program.kind], tuple(where)))
    return list(programs.values()), cases, conditions, notes


def _relieve(model: Model, programs: Sequence[Program], planned: Sequence[Case]) -> None:
    """Let go of what torch took for granted, where a run shows that the programs hold without.

    Args:
        model: the entry that the programs are of.
        programs: the forward program, or that of a step, and the gradient program of the first.
        planned: what is to be compared.
    """
    tried: list[dict[str, int]] = []
    for case in planned:
        for sizes in _parts(case.sizes, model.sizes):
            if sizes not in tried and not admits(programs[0], sizes):
                tried.append(sizes)
                _relieved(model, programs, sizes, case.seed)
    for name, usual in model.sizes.items():
        for _ in range(_LIMITS):
            below = ({**model.sizes, name: size} for size in range(usual - 1, 0, -1))
            first = next((sizes for sizes in below if not admits(programs[0], sizes)), None)
            if first is None or first in tried:
                break
            tried.append(first)
            if not _relieved(model, programs, first, planned[0].seed):
                break
    for far in plan.far(model.sizes):
        for _ in range(_LIMITS):
            first = beyond(programs[0], model.sizes, far)
            if first is None or max(first.values()) > _AFFORDABLE:
                break
            if not _relieved(model, programs, first, planned[0].seed):
                break


def _relieved(
    model: Model, programs: Sequence[Program], sizes: Mapping[str, int], seed: int
) -> bool:
    """Let go of what is not so at these sizes, if the programs hold there without; whether they do.

    Where nothing else rules them out, they hold further beyond the export's sizes, too: right
    behind a window's end the model may do something else that can hardly be seen. And they hold
    at the sizes next to the export's that it is not so at, either: what a model does to sizes that
    are no multiple of another may come to the same at 1.
    """
    beside = [
        {**model.sizes, name: size}
        for name, size in _beside(model.sizes)
        if size != sizes[name] and not admits(programs[0], {**model.sizes, name: size})
    ]
    back = forget(programs[0], sizes)
    further = {n: size * 2 if size > model.sizes[n] else size for n, size in sizes.items()}
    near = next((each for each in beside if admits(programs[0], each)), sizes)
    tried = {tuple(each.items()): each for each in (sizes, further, near)}
    if all(
        _same(model, programs, each, seed)
        for each in tried.values()
        if each == sizes or admits(programs[0], each)
    ):
        return True
    back()
    return False


def _beside(usual: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Other sizes of each dimension, by its name, the nearest first."""
    for distance in range(1, _NEAR + 1):
        for name, size in usual.items():
            yield from ((name, other) for other in (size + distance, size - distance) if other > 0)


def _parts(sizes: Mapping[str, int], usual: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes, and each of them among those of the export."""
    yield dict(sizes)
    for name, size in sizes.items():
        yield {**usual, name: size}


def _same(model: Model, programs: Sequence[Program], sizes: Mapping[str, int], seed: int) -> bool:
    """Whether programs give what the model does, but for rounding; the bounds are for `verify`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {spec.name: example(spec, sizes, generator) for spec in model.inputs}
    runs = session(model, model.module)
    gradient = any(program.kind == "gradient" for program in programs)
    try:
        with model.fused(), own_backward.inlined():
            expected: Mapping[str, Tensor | None] = runs.run(inputs)
            cotangents = {
                name: torch.randn(output.shape, generator=generator).to(output.dtype)
                for name, output in expected.items()
                if gradient and output is not None and output.is_floating_point()
            }
            if gradient:
                expected = runs.differentiate(inputs, cotangents)
        given = {**inputs, **{f"cotangent_{name}": t for name, t in cotangents.items()}}
        with torch.no_grad():
            results = [
                program.exported.module(check_guards=False)(
                    *(given[s.name] for s in program.inputs)
                )
                for program in programs
            ]
    except Exception:  # the model, or an operator in a program, refuses these sizes
        return False
    largest = max(
        (float(t.double().abs().max()) for t in expected.values() if t is not None and t.numel()),
        default=0.0,
    )
    for program, result in zip(programs, results, strict=True):
        got = result if isinstance(result, Mapping) else {program.outputs[0].name: result}
        wanted = {
            name: value
            for name, value in expected.items()
            if value is not None and (program.kind == "gradient" or not name.startswith("grad/"))
        }
        if got.keys() != wanted.keys() or not all(close(got[n], wanted[n], largest) for n in got):
            return False
    return True
