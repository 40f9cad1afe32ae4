"""Sizes that torch excluded in the capture, tried: does the program give there what the model does?

Most of what torch takes for granted of sizes is for the sake of a choice that makes no difference.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from unittest import mock

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, nn
from torch.fx import graph_module

from fuseport.exporter.models.fresh import as_now, fresh
from fuseport.exporter.models.model import Model, at, example
from fuseport.exporter.program import Program, entry_of, named_outputs
from fuseport.exporter.program.conditions import (
    admits,
    beyond,
    forget,
    hold_at,
    places,
    summarised,
    violated,
)
from fuseport.exporter.program.float64 import widened
from fuseport.exporter.program.refusing import seen
from fuseport.exporter.program.rounding import close, usual
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.verify import plan
from fuseport.exporter.verify.compare import Judgement, judge, share
from fuseport.exporter.verify.localise.reference import interpreted
from fuseport.exporter.verify.measure import Norms, errors
from fuseport.exporter.verify.other_sizes import around, one_by_one, scattered
from fuseport.exporter.verify.otherwise import of_all_ways
from fuseport.exporter.verify.plan import Case
from fuseport.exporter.verify.sample import opened
from fuseport.exporter.verify.truth import compute, in_float64, session, stored_inputs

__all__ = ["planned"]

_LIMITS = 4  # of one dimension that are tried
_AFFORDABLE = 4096  # a size that models are tried at
_FEW = 16.0  # bounds
_OTHERS = 16  # sizes at which something else is tried that is so at all that are compared
_SEVERAL = 16  # values of a mask, of which some are 0 as a rule
_DRAWS = 4  # of fewer
_SLOW = 20.0  # seconds that sizes take which are worth a word


def planned(
    model: Model,
    captured: Sequence[Program],
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Program], list[Case], dict[str, dict[str, list[str]]], list[str]]:
    """What is to be compared, at sizes for which the programs hold.

    Args:
        model: that the programs are of.
        captured: its programs.
        seed: of the first case.
        progress: told of the sizes that are tried.

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
            together=[spec.dims for spec in entry.inputs],
        )
        of_entry = [p for p in captured if entry_of(p.kind) == program.kind]
        if entry.sizes:
            progress("trying other sizes")
        trials = _Trials(entry, of_entry, wanted, progress)
        larger = _relieve(trials, entry)
        others = _elsewhere(trials, entry, wanted)
        kept, dropped = plan.admitted(wanted, partial(admits, program))
        cases += kept
        notes += dropped
        asked = [*(case.sizes for case in wanted), *plan.far(entry.sizes), *others]
        wrong = [condition for sizes in asked for condition in violated(program, sizes)]
        if wrong:
            checked, unchecked = seen(wrong)
            programs |= {p.kind: replace(p, requires=checked) for p in of_entry}
            found = {"conditions": summarised(wrong), "unchecked": summarised(unchecked)}
            conditions[program.kind] = {name: words for name, words in found.items() if words}
            where = dict.fromkeys(place for sizes in asked for place in places(program, sizes))
            notes.append(plan.conditional(program.kind, conditions[program.kind], tuple(where)))
            notes += plan.larger(program.kind, larger)
    return list(programs.values()), cases, conditions, notes


def _relieve(trials: "_Trials", model: Model) -> dict[str, int]:
    """Let go of what torch took for granted, where runs show that the programs hold without.

    Args:
        trials: of the programs.
        model: the entry that these are of.

    Returns:
        Sizes of dimensions that are larger than the programs hold for, where the model does run.
    """
    for sizes in trials.asked:
        if not trials.admitted(sizes):
            trials.relieve(sizes)
    least: dict[str, int] = {}
    for name, exported in model.sizes.items():
        tried, least[name], matters = 0, exported, set[sympy.Basic]()
        for size in range(exported - 1, 0, -1):
            sizes = {**model.sizes, name: size}
            if not hold_at(matters, sizes):  # as that a size is even
                continue
            wrong = trials.violated(sizes)
            tried += bool(wrong)
            if not wrong or (tried <= _LIMITS and trials.relieve(sizes)):
                least[name] = size
            else:
                matters.update(wrong)
    if not trials.admitted(least):  # as that there are several patches in all
        trials.relieve(least)
    larger: dict[str, int] = {}
    for far in plan.far(model.sizes):
        for _ in range(_LIMITS):
            first = trials.beyond(far)
            if first is None or max(first.values()) > _AFFORDABLE:
                break
            if not trials.relieve(first):
                if trials.ran(first):
                    larger |= {n: size for n, size in first.items() if size > model.sizes[n]}
                break
    return larger


def _elsewhere(trials: "_Trials", model: Model, planned: Sequence[Case]) -> list[dict[str, int]]:
    """Sizes at which something is not so that is so at all those of the cases, as that a number of
    blocks is even, and the programs do not hold."""
    compared = (*(case.sizes for case in planned), *plan.far(model.sizes))
    known = {condition for sizes in compared for condition in trials.violated(sizes)}
    found: list[dict[str, int]] = []
    tried = 0
    for sizes in scattered(model.sizes):
        if not hold_at(known, sizes) or not (wrong := trials.violated(sizes)):
            continue
        tried += 1
        if tried > _OTHERS or not trials.relieve(sizes):
            known.update(wrong)
            found.append(sizes)
    return found


class _Trials:
    """Runs of programs at sizes that torch excluded, each once.

    Attributes:
        asked: the sizes that are to be compared, and each of them among those of the export.
    """

    def __init__(
        self,
        model: Model,
        programs: Sequence[Program],
        planned: Sequence[Case],
        progress: Callable[[str], None],
    ) -> None:
        self._model = model
        self._progress = progress
        self._programs = programs
        self._planned = planned
        self._seed = planned[0].seed if planned else 0
        self._held: dict[tuple[tuple[str, int], ...], bool] = {}
        self._ran: set[tuple[tuple[str, int], ...]] = set()
        parts = [(s, case.seed) for case in planned for s in one_by_one(case.sizes, model.sizes)]
        # Inputs of a size are those that it is compared at, as far as there are such.
        self._seeds = {_key(sizes): seed for sizes, seed in reversed(parts)}
        self.asked = list({_key(sizes): sizes for sizes, _ in parts}.values())

    @cached_property
    def _by_autograd(self) -> bool:
        """Whether gradients are autograd's of the forward program, as there is no other: torch 2.11
        has none of loops."""
        alone = [program.kind for program in self._programs] == ["forward"]
        known = alone and self._model.differentiable
        return known and self._same(self._model.sizes, by_autograd=True)

    def admitted(self, sizes: Mapping[str, int]) -> bool:
        """Whether the programs hold there, as far as known."""
        return admits(self._programs[0], sizes)

    def relieve(self, sizes: Mapping[str, int]) -> bool:
        """Let go of what is not so at these sizes, if the programs hold without; whether they do.

        They are to hold at all sizes that are asked for then. Where nothing else rules them out,
        they hold further beyond the export's sizes, too: right behind a window's end the model may
        do something else that can hardly be seen. And they hold at the sizes next to the export's
        that it is not so at, either: what a model does to sizes that are no multiple of another may
        come to the same at 1. Nor is it let go of where they do not hold at sizes that cases are
        moved to then.
        """
        exported = self._model.sizes
        beside = [
            {**exported, name: size}
            for name, size in around(exported)
            if size != sizes[name] and not self.admitted({**exported, name: size})
        ]
        opened = [each for each in self.asked if not self.admitted(each)]
        gone = self.violated(sizes)
        back = forget(self._programs[0], sizes)
        further = {n: size * 2 if size > exported[n] else size for n, size in sizes.items()}
        near = next((each for each in beside if self.admitted(each)), sizes)
        tried = (sizes, further, near, *opened)
        # A program runs within bounds alone, and so where they are let go of.
        if all(self._hold(each) for each in tried if each is sizes or self.admitted(each)) and all(
            map(self._hold, self._moved(gone))
        ):
            return True
        back()
        return False

    def violated(self, sizes: Mapping[str, int]) -> tuple[sympy.Basic, ...]:
        """What the programs take for granted, and is not so there."""
        return violated(self._programs[0], sizes)

    def beyond(self, far: Mapping[str, int]) -> dict[str, int] | None:
        """The smallest sizes from the export's to others where the programs do not hold."""
        return beyond(self._programs[0], self._model.sizes, far)

    def ran(self, sizes: Mapping[str, int]) -> bool:
        """Whether the model was seen to run there."""
        return _key(sizes) in self._ran

    def _moved(self, gone: Sequence[sympy.Basic]) -> Iterator[Mapping[str, int]]:
        """The sizes that are to be compared now that some conditions are let go of."""
        for case in plan.admitted(self._planned, self.admitted)[0]:
            if not hold_at(gone, case.sizes):
                self._seeds.setdefault(_key(case.sizes), case.seed)
                yield case.sizes

    def _hold(self, sizes: Mapping[str, int]) -> bool:
        key = _key(sizes)
        if key not in self._held:
            by_autograd, start = self._by_autograd, monotonic()
            with as_now(self._model.module):  # of a size that it may be another one for, for good
                self._held[key] = self._same(sizes, by_autograd=by_autograd) and (
                    self._same_otherwise(sizes)
                )
            if (took := monotonic() - start) >= _SLOW:
                at = ", ".join(f"{name} {size}" for name, size in sizes.items())
                self._progress(f"that took {took:.0f} s at {at}; --size makes the example smaller")
        return self._held[key]

    def _same(self, sizes: Mapping[str, int], *, by_autograd: bool) -> bool:
        """Whether programs give what the model does, and so do their gradients, but for rounding.

        Of few zeros and ones all may be ones by chance, which is as no mask at all: more are drawn.
        """
        seed = self._seeds.get(_key(sizes), self._seed)
        masks = [spec for spec in self._model.inputs if spec.mask]
        few = any(math.prod(spec.shape(sizes)) < _SEVERAL for spec in masks)
        drawn = [
            Case("tried", sizes, "contiguous", seed + draw) for draw in range(_DRAWS if few else 1)
        ]
        return all(
            self._same_of(
                sizes,
                *self._drawn(case),
                by_autograd=by_autograd,
                refused=case is not drawn[0],
                case=case,
            )
            for case in drawn
        )

    def _same_otherwise(self, sizes: Mapping[str, int]) -> bool:
        """The same, by the other ways of branches: where none is found that goes one, it is not
        known."""
        seed = self._seeds.get(_key(sizes), self._seed)
        drawn, generator = self._drawn(Case("tried", sizes, "contiguous", seed))
        found = of_all_ways(self._programs[0], drawn)
        return found is not None and all(
            self._same_of(sizes, inputs, generator, by_autograd=self._by_autograd)
            for inputs in found
        )

    def _drawn(self, case: Case) -> tuple[Mapping[str, Tensor], torch.Generator]:
        """Inputs, and what draws more."""
        generator = torch.Generator().manual_seed(case.seed)
        return {s.name: example(s, case.sizes, generator) for s in self._model.inputs}, generator

    def _same_of(
        self,
        sizes: Mapping[str, int],
        inputs: Mapping[str, Tensor],
        generator: torch.Generator,
        *,
        by_autograd: bool,
        refused: bool = False,
        case: Case | None = None,
    ) -> bool:
        """The same, of some inputs.

        Args:
            sizes: of the inputs.
            inputs: to run on.
            generator: draws cotangents.
            by_autograd: whether gradients are autograd's of the forward program.
            refused: what is so where the model refuses the inputs.
            case: that they are of, if they are drawn: what is further off than rounding is as a
                rule, or not the same in float64, has a few of the bounds of `verify` then.
        """
        model = self._model
        differentiated = by_autograd or any(p.kind == "gradient" for p in self._programs)
        runs = session(model, model.module)
        try:
            with model.fused(), own_backward.inlined():
                expected: Mapping[str, Tensor | None] = runs.run(inputs)
                cotangents = {
                    name: torch.randn(output.shape, generator=generator).to(output.dtype)
                    for name, output in expected.items()
                    if differentiated and output is not None and output.is_floating_point()
                }
                if differentiated:
                    expected = runs.differentiate(inputs, cotangents)
        except Exception:  # the model's own, of these sizes or values
            return refused
        self._ran.add(_key(sizes))
        try:
            with mock.patch.object(graph_module, "print", _silent, create=True):
                results = self._results(inputs, cotangents, by_autograd=by_autograd)
        except Exception:  # an operator in a program refuses these sizes
            return False
        known = {name: value for name, value in expected.items() if value is not None}
        if not all(_alike(result, known, lambda *_: True) for result in results):
            return False
        if all(_alike(result, known, usual) for result in results) and self._same_in_float64(
            inputs, cotangents
        ):
            return True
        return case is not None and self._judged(case, by_autograd=by_autograd)

    def _results(
        self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], *, by_autograd: bool
    ) -> list[Mapping[str, Tensor | None]]:
        """What each program gives."""
        results: list[Mapping[str, Tensor | None]] = []
        for program in self._programs:
            module = program.exported.module(check_guards=False)
            outputs = partial(named_outputs, names=[spec.name for spec in program.outputs])
            runs = ModuleSession(module, module.named_parameters(), outputs)
            passed = _given(program, inputs, cotangents)
            if by_autograd:
                results.append(runs.differentiate(passed, cotangents))
            else:
                results.append(runs.run(passed))
        return results

    def _same_in_float64(
        self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
    ) -> bool:
        """Whether programs give the same as the model there; rounding hides what is as small."""
        try:
            with own_backward.inlined(), as_now(self._wide):
                known, _ = in_float64(self._model, self._wide, inputs, cotangents)
            for program in self._programs:
                names = [spec.name for spec in program.outputs]
                found = interpreted(program, _given(program, inputs, cotangents), names)
                if not all(_agrees(value, known.get(name)) for name, value in found.items()):
                    return False
        except Exception:  # an operator's, or the model's own: that takes no float64
            return False
        return True

    @cached_property
    def _wide(self) -> nn.Module:
        return widened(fresh(self._model.module))

    def _judged(self, case: Case, *, by_autograd: bool) -> bool:
        """Whether programs are within a few of the bounds of `verify`, which looks twice.

        Where they are not within one, that has to be rounding: in float64 they are within it.
        """
        with TemporaryDirectory() as folder, ExitStack() as opening:
            (sample,) = compute(self._model, [case], Path(folder))
            if sample.refused is not None:
                return False
            exact = opening.enter_context(opened(sample))
            inputs, cotangents = stored_inputs(self._model, sample.file)
            results = self._results(inputs, cotangents, by_autograd=by_autograd)
            for program, result in zip(self._programs, results, strict=True):
                found = {
                    name: judge(name, value, exact(name), sample.expected[name])
                    for name, value in result.items()
                    if name in sample.expected and name not in sample.unstable
                }
                if any(map(_is_wrong, found.values())):
                    return False
                doubtful = {n: f for n, f in found.items() if f.verdict == "fail"}
                if not doubtful:
                    continue
                try:
                    wide = interpreted(program, _given(program, inputs, cotangents), list(doubtful))
                except Exception:  # an operator's, which takes no float64
                    return False
                if not all(_is_within(errors(t, exact(n)), doubtful[n]) for n, t in wide.items()):
                    return False
        return True


def _given(
    program: Program, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What a program takes."""
    known = {**inputs, **{f"cotangent_{name}": t for name, t in cotangents.items()}}
    return {spec.name: known[spec.name] for spec in program.inputs}


def _agrees(found: Tensor, known: Tensor | None) -> bool:
    """Zeros are no gradient, too."""
    return not found.count_nonzero() if known is None else close(found, known, 0.0)


def _is_within(found: Norms, known: Judgement) -> bool:
    bounds = known.bound, known.rms_bound
    return None not in bounds and (share(found.max_abs, bounds[0], found.rms, bounds[1]) or 0) <= 1


def _silent(*_: object, **__: object) -> None:
    """In the place of `print`, by which torch says where a program fails, as it may here."""


def _key(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def _alike(
    result: Mapping[str, Tensor | None],
    known: Mapping[str, Tensor],
    alike: Callable[[Tensor, Tensor], bool],
) -> bool:
    """Whether a program gives all that the model does, and else zeros alone, as gradients of
    parameters that are not on the model's way."""
    found = {name: t for name, t in result.items() if t is not None}
    gradients = any(name.startswith("grad/") for name in result)
    wanted = {n: t for n, t in known.items() if gradients or not n.startswith("grad/")}
    return wanted.keys() <= found.keys() and all(
        alike(t, wanted[name]) if name in wanted else not t.count_nonzero()
        for name, t in found.items()
    )


def _is_wrong(found: Judgement) -> bool:
    if found.verdict != "fail":
        return False
    given = found.max_abs_error, found.bound, found.rms_error, found.rms_bound
    return (share(*given) or math.inf) > _FEW
