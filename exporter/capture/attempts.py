"""A model becomes the program of one way: as its code decides, its sizes numbers or not."""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fuseport.exporter.capture import blockers, counts, decisions, integers, sizes
from fuseport.exporter.capture._ends import Ends
from fuseport.exporter.capture.decisions import Decision
from fuseport.exporter.capture.holding import hold
from fuseport.exporter.errors import ExportFailed, Missing
from fuseport.exporter.models.fresh import as_now, undoing, without_modes
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import Entry, Program, count_nodes, named_outputs, one_line
from fuseport.exporter.program.conditions import nearly_fixed
from fuseport.exporter.program.forward import FixedDimension, capture_forward
from fuseport.exporter.program.loops.rolled import Unrolled
from fuseport.exporter.user_code import own_backward

__all__ = ["Attempt", "Code", "went"]

# What may stand for one of `Model.scans`.
_SCANS = (
    *(
        f"{op}{gate}"
        for op in ("selective_scan", "ssd_chunk_scan", "selective_state_update")
        for gate in ("", "_gated")
    ),
    "ssd_chunk_scan_discrete",
)

Code = Sequence[integers.Place]
"""What leaves sizes what they are, where the model's code makes numbers of them."""

Found = tuple[Program, Code]
"""A program, and what was done to get it."""


def went(
    model: Model,
    inputs: Mapping[str, torch.Tensor],
    answers: Mapping[str, bool],
    ends: Ends | None = None,
) -> tuple[list[Decision], list[torch.Tensor]]:
    """The decisions by values that a model makes, some of which come out as told, and its outputs.

    What the call keeps in the model is not in it afterwards.

    Args:
        model: the model.
        inputs: of the call.
        answers: what decisions come to, by name.
        ends: of its loops, which are no decisions then.
    """

    def call(*tensors: torch.Tensor) -> tuple[list[Decision], object]:
        with decisions.noted(answers, ends.asked if ends else None) as made:
            return made, model.module.forward(*tensors)

    with as_now(model.module), model.fused(), torch.no_grad(), own_backward.inlined():
        made, result = undoing(model.module, call)(*inputs.values())
    return made, list(named_outputs(result, model.outputs, inputs).values())


@dataclass(frozen=True)
class Attempt:
    """A capture of an entry of a model.

    Attributes:
        model: the model.
        inputs: at which it is captured.
        entry: what of it.
        state: the module as it is meanwhile; see `models.fresh`.
        made: what its code decides by values, or None if such a decision is an error.
        ends: makes what answers when loops are left by a value; None if that is one of these.
    """

    model: Model
    inputs: Mapping[str, torch.Tensor]
    entry: Entry
    state: Callable[[nn.Module], AbstractContextManager[None]]
    made: Sequence[Decision] | None = None
    ends: Callable[[], Ends] | None = None

    def found(self) -> list[Found]:
        """The program; before it, those whose sizes stay dynamic where the model's code makes
        numbers of them by `int` or `len`, if it does and takes others.

        What one module of that code has made a number of is none to another: that is known only
        once the first leaves it what it is.

        Raises:
            ExportFailed: there is none.
        """
        found: list[Found] = []
        failure: ExportFailed | None = None
        code: list[integers.Place] = []
        noticed: list[integers.Place] = []
        while True:
            with integers.symbolic(code) as loops, integers.noticed() as more:
                try:
                    found.insert(0, (self._held(code, loops), tuple(code)))
                except ExportFailed as error:
                    # That `len` of what is selected has no number says less than what comes next.
                    if isinstance(failure, FixedDimension) and isinstance(error, Unrolled):
                        failure = failure.since(str(error))
                    elif failure is None or (
                        isinstance(failure.__cause__, GuardOnDataDependentSymNode)
                        and not isinstance(error, Unrolled)
                    ):
                        failure = error
            noticed += more
            known = {(id(names), called) for names, called in code}
            new = [place for place in noticed if (id(place[0]), place[1]) not in known]
            numbers = [place for place in new if place[1] != integers.LOOPS]
            # Loops take a few turns only where nothing else leaves sizes what they are.
            if not (
                numbers or (new and (not found or nearly_fixed(found[0][0], self.model.sizes)))
            ):
                break
            code += numbers or new
        if not found:
            assert failure is not None
            raise failure
        return found

    def program(self, code: Code = ()) -> Program:
        """The program with sizes that stay dynamic in such code.

        Raises:
            ExportFailed: it cannot be captured.
            Missing: it has not one scan node for each scan of the model.
        """
        with integers.symbolic(code) as loops:
            return self._held(code, loops)

    def _held(self, code: Code, loops: Mapping[str, str | None]) -> Program:
        looped = any(called == integers.LOOPS for _, called in code)
        program = self._by_counts(sizes.roomy(self.model) if looped else self.inputs)
        if loops:
            hold(program, self.calls(sizes.about(self.model)))
            program = replace(program, decided=(*program.decided, *_said_of(loops)))
        return program

    def _by_counts(self, inputs: Mapping[str, torch.Tensor]) -> Program:
        """The program that goes the way that is right where code decides by counts."""
        turned: frozenset[str] = frozenset()
        both: frozenset[str] = frozenset()
        fatal: dict[str, str] = {}
        failure: counts.Otherwise | None = None

        def captured(fixed: Mapping[str, bool]) -> counts.Marked:
            return self._marked(inputs, turned, fixed)

        while True:
            try:
                program, counted = counts.joined(captured, both, {})
                if counted:
                    calls = self.calls(itertools.chain([inputs], sizes.others(self.model)))
                    program = counts.settled(program, counted, calls, both, fatal)
                break
            except counts.Otherwise as error:
                failure = failure or error
                if error.places <= both:
                    raise failure from None
                if error.raised is not None:
                    fatal.update(dict.fromkeys(error.places, error.raised))
                both |= error.places & turned
                turned = (turned | error.places) - both
            except ExportFailed:
                if failure is None:
                    raise
                raise failure from None
        found = sum(count_nodes(program, f"fuseport::{name}") for name in _SCANS)
        wanted = self.model.scans
        if wanted is not None and found != wanted:
            raise Missing(
                f"the captured program has {found} scan nodes where the model has {wanted} scans: "
                "the fused op did not take their place; report this with the version of the package"
            )
        return program

    def _marked(
        self,
        inputs: Mapping[str, torch.Tensor],
        turned: Container[str],
        fixed: Mapping[str, bool],
    ) -> counts.Marked:
        """A capture, and the decisions by counts in it, of which some are answered."""
        counted: list[counts.Counted] = []

        @contextmanager
        def within() -> Iterator[None]:
            counted.clear()
            with ExitStack() as stack:
                ends = None if self.ends is None else self.ends()
                if ends is not None:
                    stack.enter_context(ends.noting())
                if self.made is not None:
                    stack.enter_context(
                        decisions.following(self.made, ends.asked if ends else None)
                    )
                stack.enter_context(counts.answered(counted, turned, fixed))
                stack.enter_context(without_modes(self.model.module))  # torch calls it again
                stack.enter_context(integers.as_numbers())
                yield

        model = self.model
        with (
            model.fused(),
            own_backward.inlined(),
            blockers.fixed_sizes() as places,
            self.state(model.module),  # tensors of the trace are kept nowhere
        ):
            try:
                program = capture_forward(
                    model.module, inputs, model.inputs, model.outputs, self.entry, within
                )
            except FixedDimension as error:
                if error.size not in places:
                    raise
                raise error.at(*places[error.size]) from error
            except ExportFailed as error:
                cause = error.__cause__
                if counted and cause is not None and decisions.means_to_raise(cause):
                    place = counted[-1].decision.place
                    said = one_line(cause)
                    raise counts.Otherwise([place], f"the model raises {said}", said) from error
                raise
        return program, counted

    def calls(self, inputs: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[counts.Call]:
        """The model at some inputs, as it goes there, but for decisions by values."""
        answers = {decision.name: decision.value for decision in self.made or ()}

        def call(
            given: Mapping[str, torch.Tensor],
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            ends = None if self.ends is None else self.ends()
            _, outputs = went(self.model, given, answers, ends)
            return list(given.values()), outputs

        for given in inputs:
            yield partial(call, given)


def _said_of(loops: Mapping[str, str | None]) -> Iterator[str]:
    """A sentence on each loop over a dynamic size."""
    for place, instead in loops.items():
        faster = f"; {instead} there computes the same faster, if it is that" if instead else ""
        yield f"the loop at {place} is one in the programs, of as many turns as a size says{faster}"
