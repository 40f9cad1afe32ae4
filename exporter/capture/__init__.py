"""A model becomes programs: what it is run and captured as, and what to say where it cannot be."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import torch

from fuseport.exporter import shims
from fuseport.exporter.capture import blockers, counts, decisions, sizes, until
from fuseport.exporter.capture.attempts import Attempt, Code, went
from fuseport.exporter.capture.decisions import Decision
from fuseport.exporter.capture.guards import Natural, guards, natural
from fuseport.exporter.capture.lengths import in_order
from fuseport.exporter.capture.one_way import one_way
from fuseport.exporter.errors import ExportFailed, FuseportError, Missing
from fuseport.exporter.models.fresh import as_before, as_now, keeps, repeatable, undoing
from fuseport.exporter.models.model import Model, at, examples
from fuseport.exporter.program import (
    Entry,
    Kind,
    Program,
    entry_of,
    named_outputs,
    one_line,
)
from fuseport.exporter.program.conditions import excluded
from fuseport.exporter.program.forward import FixedDimension
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.program.matching import Inseparable
from fuseport.exporter.user_code import hint, own_backward

__all__ = ["PROGRAMS", "capture", "tried", "went"]

PROGRAMS: tuple[Kind, ...] = ("forward", "gradient")
"""What is exported unasked."""

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
    attempt = Attempt(model, inputs, entry, as_now)
    found: list[Program] = []
    failure: ExportFailed | None = None
    try:
        found = [program for program, _ in attempt.found()]
    except ExportFailed as error:
        failure = error
    if keeps(model.module) and (failure or excluded(found[0], model.sizes)):
        with suppress(ExportFailed):
            others = [program for program, _ in replace(attempt, state=as_before).found()]
            if not found or excluded(others[0], model.sizes) < excluded(found[0], model.sizes):
                found = [*others, *found]
    if found:
        return found
    assert failure is not None
    try:
        return [_decided(attempt)]
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


def _decided(attempt: Attempt) -> Program:
    """The program of an entry whose code decides by values.

    Raises:
        Inseparable: it does not, or too much hangs on it.
        ExportFailed: it cannot be captured for other reasons.
    """
    model, inputs = attempt.model, attempt.inputs
    code: Code | None = None  # not known before a first capture
    loops: until.Loops | None = None
    endless: Inseparable | None = None
    try:
        loops = until.loops(attempt)
    except Inseparable as error:
        endless = error

    def run(
        answers: Mapping[str, bool], given: Mapping[str, torch.Tensor] = inputs
    ) -> tuple[Sequence[Decision], list[torch.Tensor]]:
        return went(model, given, answers, loops.as_values_say() if loops else None)

    def of_way(way: Attempt) -> Program:
        nonlocal code
        if code is None:
            (program, code), *_ = way.found()
            return program
        return way.program(code)

    def captured(made: Sequence[Decision]) -> Program:
        way = replace(attempt, made=made)
        return loops.program(way, of_way) if loops else of_way(way)

    def called(program: Program) -> list[torch.Tensor]:
        with torch.no_grad():
            result = program.exported.module(check_guards=False)(*inputs.values())
        return [result] if isinstance(result, torch.Tensor) else list(result.values())

    @cache
    def gone() -> list[Natural]:
        others = itertools.islice(sizes.others(model), 3)
        return natural([run, *(partial(run, given=each) for each in others)])

    def joined() -> Program:
        if loops and not run({})[0]:
            return captured([])
        try:
            return decisions.decided(run, captured, called)
        except Inseparable as error:
            if found := guards(gone()):
                return decisions.decided(run, captured, called, found)
            raise (endless or error) from error

    try:
        return joined()
    except ExportFailed as error:
        failure = error
    if symbolic := code:
        code = ()  # what numbers its code makes of sizes are in the way
        with suppress(ExportFailed):
            return joined()
        code = symbolic
    with suppress(ExportFailed):
        if alone := one_way(gone(), captured):
            return decisions.decided(run, captured, called, alone=alone)
    raise failure


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
