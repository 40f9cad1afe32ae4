"""A model becomes programs: what it is run and captured as, and what to say where it cannot be."""

import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fuseport.exporter import shims
from fuseport.exporter.capture import blockers, counts, decisions, integers, sizes
from fuseport.exporter.capture.decisions import Decision
from fuseport.exporter.capture.guards import guards
from fuseport.exporter.capture.holding import hold
from fuseport.exporter.capture.lengths import in_order
from fuseport.exporter.errors import ExportFailed, FuseportError, Missing
from fuseport.exporter.models.fresh import as_before, as_now, keeps, repeatable, undoing
from fuseport.exporter.models.model import Model, at, examples
from fuseport.exporter.program import (
    Entry,
    Kind,
    Program,
    count_nodes,
    entry_of,
    named_outputs,
    one_line,
)
from fuseport.exporter.program.conditions import excluded, nearly_fixed
from fuseport.exporter.program.forward import FixedDimension, capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.program.matching import Inseparable
from fuseport.exporter.program.rolled import Unrolled
from fuseport.exporter.user_code import hint, own_backward

__all__ = ["PROGRAMS", "capture", "tried", "went"]

PROGRAMS: tuple[Kind, ...] = ("forward", "gradient")
"""What is exported unasked."""

# What may stand for one of `Model.scans`.
_SCANS = (
    *(
        f"{op}{gate}"
        for op in ("selective_scan", "ssd_chunk_scan", "selective_state_update")
        for gate in ("", "_gated")
    ),
    "ssd_chunk_scan_discrete",
)


Progress = Callable[[str], None]


def tried(model: Model, seed: int) -> tuple[Model, tuple[str, ...]]:
    """A model of any code, run once, and what to tell the user.

    Its autograd functions, and the stand-ins for packages that it imports when called, are in its
    configuration then. What model code makes at its first call and keeps, as grids and tables, must
    be no tensor of a trace, and the error of a model that does not run should be its own.
    """
    if not model.general:
        return model, ()
    inputs = examples(model, torch.Generator().manual_seed(seed))
    try:
        with (
            shims.installed(model.stand_ins) as late,
            torch.no_grad(),
            own_backward.seen() as functions,
        ):
            call = repeatable(model.module, model.module)
            ordered = in_order(model, inputs, call)
            if ordered is not model:
                model, inputs = ordered, examples(ordered, torch.Generator().manual_seed(seed))
            result = call(*inputs.values())
    except Exception as error:  # the user's code can raise anything
        failed = ExportFailed(f"the model itself does not run, {_at(model, inputs, error)}")
        raise _explained(failed, model, inputs, runs=False) from error
    if not named_outputs(result):
        raise ExportFailed(f"the model returns no tensor, but a {type(result).__name__}")
    used = sorted({*model.config["shims"], *late})
    config = {**model.config, "functions": list(functions), "shims": used}
    for kind in ("unseen", "wrong"):
        if names := [name for name, verdict in functions.items() if verdict == kind]:
            config[kind] = names
    notes = [*own_backward.doubts(config)]
    if names := [spec.name for spec in model.inputs if spec.descending]:
        notes.append(f"{', '.join(names)}: in decreasing order wherever drawn, as the model asks")
    if late:
        names = sorted(late)
        notes.append(
            f"stand-ins take the place of {', '.join(names)} where the model is called: "
            "see fuseport.shims"
        )
    return replace(model, config=config), tuple(notes)


def _at(model: Model, inputs: Mapping[str, torch.Tensor], error: Exception) -> str:
    """What it does not run at, why, and how to run it at something else."""
    at = ", ".join(f"{name} {tuple(t.shape)}" for name, t in inputs.items())
    held = {str(p.dtype)[6:] for p in model.module.parameters() if p.is_floating_point()}
    passed = sorted({str(t.dtype)[6:] for t in inputs.values() if t.is_floating_point()})
    if len(held) == 1 and passed and not held.intersection(passed):
        (wanted,) = held
        return (
            f"at {at}: {one_line(error)}; its weights are {wanted}, its inputs {passed[0]}: give "
            f"inputs of {wanted}, or --dtype {passed[0]}"
        )
    what_to_do = hint(error)
    if what_to_do or isinstance(error, NameError | ImportError | NotImplementedError):
        return f"at {at}: {one_line(error)}{what_to_do}"  # no shapes are to blame
    other = "if its inputs are of other shapes, give such examples"
    if model.given is None:
        other = "if its inputs are of other shapes: --input-shapes"
        if bounded := [spec.name for spec in model.inputs if spec.high is not None]:
            other += f"; if {', '.join(bounded)} are of other values: bounds there, >=1<=length, or"
            other += " --inputs"
        elif isinstance(error, IndexError) and "out of" in str(error):
            (first, *_) = model.inputs
            dims = ",".join(map(str, first.dims))
            other += f"; if one holds indices: integers with a bound, {first.name}:int64[{dims}]<9"
        sizes = ", ".join(f"{name}={size}" for name, size in model.sizes.items())
        other += f"; of other sizes than {sizes}: --size" if sizes else ""
    return f"at {at}: {one_line(error)}; {_taken(model, error)}{other}"


def _taken(model: Model, error: Exception) -> str:
    """How to name what is in a mapping, where code looks up keys in a tensor of another name."""
    names = list(inspect.signature(model.module.forward).parameters)
    looked_up = isinstance(error, IndexError | TypeError | AttributeError | KeyError)
    if not (looked_up and names and len(model.inputs) == 1):
        return ""
    (name,) = (spec.name for spec in model.inputs)
    if name.partition(".")[0] in names:
        return ""
    return (
        f"its forward takes {names[0]}: if that is a mapping, name all that is in it, "
        f"{names[0]}.{name}:[…] and others; "
    )


def capture(
    model: Model,
    wanted: Sequence[Kind] = PROGRAMS,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Iterator[Program]:
    """The forward program of a model and, if wanted, the gradient program and that of a step.

    Raises:
        UsageError: a step is wanted of a model that has none.
        ExportFailed: the model cannot be captured.
        Missing: the captured program has not one scan node for each scan of the model.
    """
    entries: dict[Entry, Model] = {
        entry: at(model, entry) for entry in dict.fromkeys(("forward", *map(entry_of, wanted)))
    }
    for entry, called in entries.items():
        progress(f"capturing the {entry} program")
        differentiated = entry == "forward" and "gradient" in wanted
        yield from _captured(called, entry, seed, progress, differentiated=differentiated)


def _captured(
    model: Model, entry: Entry, seed: int, progress: Progress, *, differentiated: bool
) -> tuple[Program, ...]:
    """The program of an entry and, if it is differentiated, the gradient program."""
    *better, plain = _forwards(model, entry, seed, progress)
    if not differentiated:
        return (*better, plain)[:1]
    if unseen := model.config.get("unseen"):
        raise ExportFailed(
            f"there is no gradient program: autograd does not see what {', '.join(unseen)} computes"
            " (in memory of another library's, for one), and a backward of the model's own is in "
            "no artifact; write its forward with operators that autograd sees, or export "
            "outputs alone: --program forward"
        )
    progress("capturing the gradient program")
    for program in better:
        with suppress(ExportFailed):
            return program, capture_gradient(program)
    return plain, capture_gradient(plain)


def _forwards(model: Model, entry: Entry, seed: int, progress: Progress) -> list[Program]:
    """Programs of an entry, the best first.

    What a model's code made at its first call, as tables, are constants of its capture. Where that
    does not hold for all sizes, it is captured as at its first call, too: what is made there
    depends on the sizes of the inputs then.
    """
    _refuse_compiled(model)
    inputs = examples(model, torch.Generator().manual_seed(seed))
    found: list[Program] = []
    failure: ExportFailed | None = None
    try:
        found = _captures(model, inputs, entry, as_now)
    except ExportFailed as error:
        failure = error
    if keeps(model.module) and (failure or excluded(found[0], model.sizes)):
        with suppress(ExportFailed):
            others = _captures(model, inputs, entry, as_before)
            if not found or excluded(others[0], model.sizes) < excluded(found[0], model.sizes):
                found = [*others, *found]
    if found:
        return found
    assert failure is not None
    try:
        return [_decided(model, inputs, entry)]
    except Inseparable as error:
        reason = str(error)
    except ExportFailed as error:  # what else there is
        fixed = isinstance(failure, FixedDimension) and isinstance(error, FixedDimension)
        failure, reason = (failure if fixed else error), ""
    if isinstance(failure, FixedDimension | counts.Otherwise):
        raise failure  # the capture went through: nothing blocks it
    progress("looking for what blocks the export")
    with model.fused(), own_backward.inlined():
        explained = _explained(failure, model, inputs, reason)
    raise explained from (failure.__cause__ if explained is failure else failure)


def went(
    model: Model, inputs: Mapping[str, torch.Tensor], answers: Mapping[str, bool]
) -> tuple[list[Decision], list[torch.Tensor]]:
    """The decisions by values that a model makes, some of which come out as told, and its outputs.

    What the call keeps in the model is not in it afterwards.
    """

    def call(*tensors: torch.Tensor) -> tuple[list[Decision], object]:
        with decisions.noted(answers) as made:
            return made, model.module.forward(*tensors)

    with as_now(model.module), model.fused(), torch.no_grad(), own_backward.inlined():
        made, result = undoing(model.module, call)(*inputs.values())
    return made, list(named_outputs(result, model.outputs, inputs).values())


def _decided(model: Model, inputs: Mapping[str, torch.Tensor], entry: Entry) -> Program:
    """The program of an entry whose code decides by values.

    Raises:
        Inseparable: it does not, or too much hangs on it.
        ExportFailed: it cannot be captured for other reasons.
    """

    def run(answers: Mapping[str, bool]) -> tuple[Sequence[Decision], list[torch.Tensor]]:
        return went(model, inputs, answers)

    def captured(made: Sequence[Decision]) -> Program:
        return _forward(model, inputs, entry, as_now, made)

    def called(program: Program) -> list[torch.Tensor]:
        with torch.no_grad():
            result = program.exported.module(check_guards=False)(*inputs.values())
        return [result] if isinstance(result, torch.Tensor) else list(result.values())

    try:
        return decisions.decided(run, captured, called)
    except Inseparable:
        others = itertools.islice(sizes.others(model), 3)
        found = guards([run, *(partial(went, model, each) for each in others)])
        if not found:
            raise
        return decisions.decided(run, captured, called, found)


def _captures(
    model: Model,
    inputs: Mapping[str, torch.Tensor],
    entry: Entry,
    state: Callable[[nn.Module], AbstractContextManager[None]],
) -> list[Program]:
    """The program of an entry; before it, those whose sizes stay dynamic where the model's code
    makes numbers of them by `int` or `len`, if it does and takes others.

    What one module of that code has made a number of is none to another: that is known only once
    the first leaves it what it is.
    """
    found: list[Program] = []
    failure: ExportFailed | None = None
    code: list[integers.Place] = []
    noticed: list[integers.Place] = []
    while True:
        looped = any(called == integers.LOOPS for _, called in code)
        with integers.symbolic(code) as loops, integers.noticed() as more:
            try:
                program = _forward(model, sizes.roomy(model) if looped else inputs, entry, state)
                if loops:
                    hold(program, _calls(model, sizes.about(model), ()))
                    program = replace(program, decided=(*program.decided, *_said_of(loops)))
                found.insert(0, program)
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
        if not (numbers or (new and (not found or nearly_fixed(found[0], model.sizes)))):
            break
        code += numbers or new
    if not found:
        assert failure is not None
        raise failure
    return found


def _forward(
    model: Model,
    inputs: Mapping[str, torch.Tensor],
    entry: Entry,
    state: Callable[[nn.Module], AbstractContextManager[None]],
    made: Sequence[Decision] | None = None,
) -> Program:
    """The program of an entry, going the way that is right where code decides by counts."""
    turned: frozenset[str] = frozenset()
    both: frozenset[str] = frozenset()
    fatal: dict[str, str] = {}
    failure: counts.Otherwise | None = None

    def captured(fixed: Mapping[str, bool]) -> counts.Marked:
        return _marked(model, inputs, entry, state, made, (turned, fixed))

    while True:
        try:
            program, counted = counts.joined(captured, both, {})
            if counted:
                calls = _calls(model, itertools.chain([inputs], sizes.others(model)), made or ())
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
    if model.scans is not None and found != model.scans:
        raise Missing(
            f"the captured program has {found} scan nodes where the model has {model.scans} scans: "
            "the fused op did not take their place; report this with the version of the package"
        )
    return program


def _marked(
    model: Model,
    inputs: Mapping[str, torch.Tensor],
    entry: Entry,
    state: Callable[[nn.Module], AbstractContextManager[None]],
    made: Sequence[Decision] | None,
    answers: tuple[Container[str], Mapping[str, bool]],
) -> counts.Marked:
    """A capture, and the decisions by counts in it, which `answers` says more of."""
    counted: list[counts.Counted] = []

    @contextmanager
    def within() -> Iterator[None]:
        counted.clear()
        following = nullcontext() if made is None else decisions.following(made)
        with following, counts.answered(counted, *answers):
            yield

    with (
        model.fused(),
        own_backward.inlined(),
        blockers.fixed_sizes() as places,
        state(model.module),  # tensors of the trace are kept nowhere
    ):
        try:
            program = capture_forward(
                model.module, inputs, model.inputs, model.outputs, entry, within
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


def _calls(
    model: Model, inputs: Iterable[Mapping[str, torch.Tensor]], made: Sequence[Decision]
) -> Iterator[counts.Call]:
    """The model at some inputs, going the way that it goes there, but for decisions by values."""
    answers = {decision.name: decision.value for decision in made}

    def call(given: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        _, outputs = went(model, given, answers)
        return list(given.values()), outputs

    for given in inputs:
        yield partial(call, given)


def _said_of(loops: Mapping[str, str | None]) -> Iterator[str]:
    """A sentence on each loop over a dynamic size."""
    for place, instead in loops.items():
        faster = f"; {instead} there computes the same faster, if it is that" if instead else ""
        yield f"the loop at {place} is one in the programs, of as many turns as a size says{faster}"


def _refuse_compiled(model: Model) -> None:
    """Refuse modules of TorchScript, which torch.export does not look into.

    Raises:
        ExportFailed: there is one.
    """
    compiled: list[str] = []
    for name, part in model.module.named_modules():
        inside = any(name.startswith(f"{other}.") for other in compiled)
        if not inside and isinstance(getattr(part, "forward", None), torch._C.ScriptMethod):
            compiled.append(name)
    if compiled:
        raise ExportFailed(
            f"torch.jit compiled {', '.join(compiled)} in the model: that cannot be exported again;"
            " with PYTORCH_JIT=0 in the environment torch leaves their code as it is, and there is "
            "no TorchScript: --format exported_program,onnx"
        )


_DECIDES = "Tensor.__bool__"


def _explained(
    error: ExportFailed,
    model: Model,
    inputs: Mapping[str, torch.Tensor],
    undecided: str = "",
    *,
    runs: bool = True,
) -> FuseportError:
    """The same error, with every call in the model's code that an export cannot follow.

    Decisions by values have with them why they are in no program, `undecided`. Where the model does
    not run at all, what it decides by values, as assertions do, is left out.
    """
    call = undoing(model.module, model.module)
    found = blockers.find(lambda: call(*inputs.values()))
    found = tuple(
        replace(each, why=f"{each.why}, and {undecided}") if each.call == _DECIDES else each
        for each in found
        if each.call != _DECIDES or (runs and undecided)
    )
    end = None
    if runs and error.__cause__ is not None:
        end = blockers.ending(error.__cause__, found)
        found = found if end is None else (end, *found)
    if not found:
        return error
    first, *more = found
    if not more and first.call in str(error) and first.what_to_do == blockers.MEND:
        return ExportFailed(str(error).replace(first.call, f"{first.call} ({first.where})"))
    # The reason of torch goes on about symbolic tensors: its first sentence will do.
    order = "in the order of the calls"
    if end is not None and more:
        order = f"first where the capture ends, then {order}"
    said = f"{str(error).partition('. ')[0]}; what blocks it, {order}:"
    kind = Missing if all(blocker.missing for blocker in found) else ExportFailed
    return kind(said, [str(blocker) for blocker in found])
