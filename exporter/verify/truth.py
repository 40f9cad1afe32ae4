"""The truth in float64, and how far equally good computations in the working dtype are from it.

Truth is the model over the reference implementations of its ops, in float64 throughout: casts to
narrower types in model code are raised. The baseline is the same in the working dtype, computed in
several equally good ways; the largest error among them is what a candidate is measured by. Autograd
functions of the model's own are inlined in both, as export does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.errors import ExportFailed, StorageError
from fuseport.exporter.models import Model
from fuseport.exporter.models.fresh import as_now, fresh, repeatable
from fuseport.exporter.models.model import at, continued, example, named
from fuseport.exporter.program import Entry, one_line
from fuseport.exporter.program.float64 import Float64, widened
from fuseport.exporter.runtimes._layouts import apart
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.verify import baseline, kinks
from fuseport.exporter.verify.choices import Choices, FirstOfEqual
from fuseport.exporter.verify.compare import Expected, expecting
from fuseport.exporter.verify.doubts import of_use
from fuseport.exporter.verify.measure import errors
from fuseport.exporter.verify.modes import References
from fuseport.exporter.verify.plan import GIVEN, Case, unseeded
from fuseport.exporter.verify.sample import Sample, Truth, opened, together, write_index

__all__ = ["Jumps", "compute", "further", "in_float64", "jumps", "session", "stored_inputs"]

Tensors = Mapping[str, Tensor]

_ROUNDINGS = 16.0  # of a tensor's scale
_JUMPS = 2**30  # bytes


def compute(
    model: Model,
    cases: Sequence[Case],
    folder: Path,
    *,
    limit: int | None = None,
    given: Mapping[str, Path] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    spent: Spent | None = None,
) -> tuple[Sample, ...]:
    """Compute truth and baseline of `model` on each case, and write them to `folder`.

    Args:
        model: in the working dtype; it is the same afterwards.
        cases: to compute.
        folder: exists, and gets one file for each case and an index.
        limit: truth of more bytes is left out of the files.
        given: files of an earlier call by the case's name, whose inputs and cotangents are taken;
            where the model refuses what is drawn for another seed, the integers alone.
        progress: told of what is being done.
        spent: to count the time in.

    Raises:
        ExportFailed: the model does not run in float64.
        StorageError: there is no room for the truth.
    """
    samples: tuple[Sample, ...] = ()
    spent = spent or Spent()
    wide: tuple[Entry, nn.Module] | None = None  # one at a time: models can be large
    for number, case in enumerate(cases):
        progress(f"truth in float64: {case.name}")
        called = at(model, case.entry)
        if wide is None or wide[0] != case.entry:
            wide = None  # given back before the next is made
            with spent.on("truth"):
                wide = case.entry, widened(fresh(called.module))
        file = folder / f"case{number}.safetensors"
        # What calls of a case keep, as another choice from then on, is of no other's concern.
        with own_backward.inlined(), as_now(called.module), as_now(wide[1]):
            sample = _sample(called, wide[1], case, file, limit, given or {}, spent)
        if case.nothing and given is None and not of_use(sample):
            file.unlink(missing_ok=True)
        else:
            samples += (sample,)
    samples = together(samples)
    write_index(folder, samples)
    return samples


def _sample(
    model: Model,
    wide: nn.Module,
    case: Case,
    file: Path,
    limit: int | None,
    given: Mapping[str, Path],
    spent: Spent,
) -> Sample:
    with spent.on("truth"):
        try:
            if case.name in given:
                inputs, cotangents = stored_inputs(model, given[case.name])
            else:
                inputs, cotangents = _drawn(model, case, given)
        except _RefusedError as refusal:
            return Sample(case, file, {}, refused=str(refusal))
        passed = {f"input/{name}": t for name, t in inputs.items()}
        passed |= {f"cotangent/{name}": t for name, t in cotangents.items()}
        exact, choices = in_float64(model, wide, inputs, cotangents)
        none = tuple(name for name, tensor in exact.items() if tensor is None)
        kept = {f"truth/{n}": t.contiguous() for n, t in exact.items() if t is not None}
        # From here on the truth is read from disk, so that memory has it once, then not at all.
        del exact
        both = apart(passed | kept)  # a model may return what it was given
        passed, kept = ({name: both.pop(name) for name in part} for part in (passed, kept))
        _save(passed | kept, file)
    omitted = [name for name, t in kept.items() if limit is not None and t.nbytes > limit]
    names = [name.removeprefix("truth/") for name in kept]
    if omitted:
        stored = passed | {name: t for name, t in kept.items() if name not in omitted}
    del kept
    sample = Sample(case, file, {}, none, tuple(n.removeprefix("truth/") for n in omitted))
    with spent.on("baseline"), opened(sample) as truth:
        expected, unstable, undecided = _baseline(model, inputs, cotangents, names, truth, choices)
    if omitted:
        file.unlink()
        _save(stored, file)
    return replace(
        sample,
        expected=expected,
        unstable=unstable,
        chooses=bool(choices.made),
        undecided=undecided,
    )


class _RefusedError(Exception):
    """The model cannot run a case."""


def _integers(model: Model, case: Case, given: Mapping[str, Path]) -> Tensors:
    """Those of the case that differs in its seed alone, or of the user's own inputs."""
    wanted = [spec for spec in model.inputs if not spec.floating]
    stored = given.get(unseeded(case))
    if stored is not None:
        with safe_open(stored, "pt") as file:
            own = {spec.name: file.get_tensor(f"input/{spec.name}") for spec in wanted}
    else:
        own = dict(model.given or {})
    return {
        spec.name: continued(own[spec.name], spec.shape(case.sizes))
        for spec in wanted
        if spec.name in own and own[spec.name].numel()
    }


def _drawn(model: Model, case: Case, given: Mapping[str, Path]) -> tuple[Tensors, Tensors]:
    """Random inputs and cotangents; where the model refuses random integers, those known."""
    generator = torch.Generator().manual_seed(case.seed)
    if case.name == GIVEN and model.given is not None:
        inputs = dict(model.given)
    else:
        inputs = {spec.name: example(spec, case.sizes, generator) for spec in model.inputs}
    try:
        taken, outputs = _ran(model, case, inputs)
    except _RefusedError as refusal:
        integers = {} if case.name == GIVEN else _integers(model, case, given)
        if not integers:
            raise
        try:
            taken, outputs = _ran(model, case, {**inputs, **integers})
        except _RefusedError:
            raise refusal from None
    cotangents = {
        name: _cotangent(output, case.layout, generator)
        for name, output in outputs.items()
        if output.is_floating_point() and model.differentiable
    }
    return taken, cotangents


def _ran(model: Model, case: Case, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The inputs, with masks as the case has them, and the outputs."""
    masks = {s.name: torch.zeros_like(inputs[s.name]) for s in model.inputs if s.mask}
    inputs = {**inputs, **(masks if case.nothing else {})}
    try:
        with References():
            return inputs, session(model, model.module).run(inputs)
    except Exception as error:  # model code may refuse a shape with any error
        raise _RefusedError(f"{one_line(error)}{_by_values(model, inputs)}") from error


def _by_values(model: Model, inputs: Tensors) -> str:
    """That the values of integers are to blame, where the model runs with the least of them."""
    bounded = [spec for spec in model.inputs if spec.high is not None]
    if not bounded:
        return ""
    least = {spec.name: torch.full_like(inputs[spec.name], spec.low) for spec in bounded}
    try:
        with References():
            session(model, model.module).run({**inputs, **least})
    except Exception:  # the same, or another: sizes are to blame
        return ""
    values = ", ".join(f"{name} {int(t.flatten()[0])}" for name, t in least.items() if t.numel())
    return f"; with {values} it runs: bounds may be too high (--input-shapes)" if values else ""


def stored_inputs(model: Model, file: Path) -> tuple[Tensors, Tensors]:
    """Inputs and cotangents of a sample."""
    with safe_open(file, "pt") as stored:
        inputs = {s.name: stored.get_tensor(f"input/{s.name}") for s in model.inputs}
        names = [n for n in stored.keys() if n.startswith("cotangent/")]  # noqa: SIM118
        cotangents = {n.removeprefix("cotangent/"): stored.get_tensor(n) for n in names}
    # As for drawn inputs, the first run is one in the working dtype: model code may keep what it
    # makes at its first call (VFIMamba's grids), and could not use it if it were float64.
    with References():
        session(model, model.module).run(inputs)
    return inputs, cotangents


def _cotangent(output: Tensor, layout: str, generator: torch.Generator) -> Tensor:
    if layout == "expanded" and output.dim() > 1:
        row = torch.randn(output.shape[-1:], generator=generator).to(output.dtype)
        return row.expand(output.shape).contiguous()
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def session(model: Model, module: nn.Module) -> ModuleSession:
    """What runs and differentiates the model's module, or a copy of that in another dtype."""
    return ModuleSession(
        repeatable(module, module),
        module.named_parameters(),
        lambda result: named(model, result),
    )


def _results(
    model: Model, module: nn.Module, inputs: Tensors, cotangents: Tensors
) -> dict[str, Tensor | None]:
    """Outputs and, where there are any, gradients."""
    runs = session(model, module)
    if model.differentiable:
        return runs.differentiate(inputs, cotangents)
    return dict(runs.run(inputs))


def in_float64(
    model: Model, wide: nn.Module, inputs: Tensors, cotangents: Tensors
) -> tuple[dict[str, Tensor | None], Choices]:
    """The truth of some inputs, and what the model chose in it.

    Args:
        model: as for `compute`.
        wide: its module, `widened`.
        inputs: in the working dtype.
        cotangents: by output.

    Raises:
        ExportFailed: the model does not run in float64.
    """

    def widened(tensors: Tensors) -> dict[str, Tensor]:
        return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}

    def computed(mode: Float64) -> tuple[dict[str, Tensor | None], Choices]:
        with Choices() as choices, References(), mode:
            return _results(model, wide, widened(inputs), widened(cotangents)), choices

    failed: list[Exception] = []
    for told in _TOLD:  # model code may insist on a dtype with any error
        try:
            results, choices = computed(Float64(told=told))
            break
        except Exception as error:
            failed.append(error)
    else:
        raise ExportFailed(_why_no_truth(failed[1])) from failed[1]
    for name, value in results.items():
        if value is not None and value.is_floating_point() and value.dtype != torch.float64:
            raise ExportFailed(f"truth of {name} came out as {value.dtype}, not float64")
    return results, choices


_TOLD = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _why_no_truth(error: BaseException) -> str:
    return (
        "the model does not run in float64, in which truth is computed: "
        f"{one_line(error)}; make its code take any floating dtype"
    )


# In units of what rounding does: what equal values make by being taken otherwise is far more.
_TIED = 16.0


def _baseline(
    model: Model,
    inputs: Tensors,
    cotangents: Tensors,
    names: Sequence[str],
    truth: Truth,
    choices: Choices,
) -> tuple[dict[str, Expected], tuple[str, ...], tuple[str, ...]]:
    """What is expected of each tensor beside the truth, what does not repeat itself, and the
    functions that choose otherwise than in the truth in most computations."""
    expected: dict[str, Expected] = {}
    unstable: set[str] = set()
    first: dict[str, Tensor] = {}
    others: dict[str, None] = {}
    alike = count = 0
    for number, way in enumerate(baseline.ways(model.module, inputs)):
        results, mine = _another(model, inputs, cotangents, way, number)
        otherwise = choices.otherwise(mine)
        others |= dict.fromkeys(otherwise)
        alike, count = alike + (not otherwise), count + 1
        for name in names:
            value = results.pop(name, None)
            if value is None:
                raise ExportFailed(f"{name} exists in float64 only: the model depends on its dtype")
            if number == 0:
                first[name] = value
            elif number == 1 and not _repeats(value, first.pop(name), expected[name].scale.max_abs):
                unstable.add(name)
            expected[name] = expecting(value, truth(name), expected.get(name))
    undecided = tuple(others) if 2 * alike < count else ()
    if choices.has("topk") and _tied(model, inputs, cotangents, truth, expected):
        undecided = tuple(dict.fromkeys([*undecided, "topk"]))
    return expected, tuple(sorted(unstable)), undecided


def _tied(
    model: Model, inputs: Tensors, cotangents: Tensors, truth: Truth, expected: dict[str, Expected]
) -> bool:
    """Whether results hang on which of equal values `topk` takes; `expected` has both then."""
    with FirstOfEqual() as first_of_equal:
        results, _ = _another(model, inputs, cotangents, nullcontext(inputs), 0)
    found = False
    if first_of_equal.otherwise:
        for name, known in expected.items():
            value = results.get(name)
            if value is not None:
                expected[name] = expecting(value, truth(name), known)
                most = _TIED * known.baseline.max_abs
                found = found or expected[name].baseline.max_abs > most
    return found


def further(model: Model, sample: Sample, number: int) -> Sample:
    """The same with a baseline of `baseline.FURTHER` more computations.

    Args:
        model: as for `compute`.
        sample: whose truth is whole.
        number: of these calls for one sample, from 0: each computes in other ways.
    """
    called = at(model, sample.case.entry)
    expected = dict(sample.expected)
    with own_backward.inlined(), opened(sample) as truth:
        inputs, cotangents = stored_inputs(called, sample.file)
        begin = (number + 1) * baseline.FURTHER
        ways = baseline.further(called.module, inputs, begin)
        for seed, way in enumerate(ways, begin):
            results, _ = _another(called, inputs, cotangents, way, seed)
            for name, known in expected.items():
                value = results.pop(name, None)
                if value is not None:
                    expected[name] = expecting(value, truth(name), known)
    return replace(sample, expected=expected)


@dataclass(frozen=True)
class Jumps:
    """How results change with values that rounding may put on either side of a kink.

    Attributes:
        found: for each such value the differences by output and gradient, in float32 at least.
        whole: whether these are all such values that there are.
    """

    found: Mapping[kinks.Place, Tensors]
    whole: bool


def jumps(model: Model, sample: Sample, off: Tensors, known: Jumps | None = None) -> Jumps:
    """How results change with each value that rounding may put on either side of a kink.

    Of more than `kinks.MOST`, or than there is room for in a gigabyte, those that explain best what
    is off.

    Args:
        model: as for `compute`.
        sample: any of it.
        off: by gradient, over the square of what is allowed.
        known: what an earlier call gave for this sample.
    """
    called = at(model, sample.case.entry)
    inputs, cotangents = stored_inputs(called, sample.file)

    def results(mode: AbstractContextManager[Any], way: AbstractContextManager[Tensors]) -> Any:
        with way as moved, mode:
            found, _ = _another(called, inputs, cotangents, nullcontext(moved), 0)
        return {
            name: value.to(torch.promote_types(value.dtype, _of_jump(value)))
            for name in sample.expected
            if (value := found.get(name)) is not None and value.dtype != torch.bool
        }

    with own_backward.inlined():
        sampled = kinks.Sampled()
        results(sampled, baseline.moved(called.module, inputs, 0))
        near = kinks.Near(sampled.samples)
        plain = results(near, nullcontext(inputs))
        room = _JUMPS // max(1, sum(value.nbytes for value in plain.values()))
        places, most = near.places(), min(kinks.MOST, max(1, room))
        if whole := len(places) <= most:
            wanted = places
        else:
            gaps = kinks.Gaps(places)
            direction = {name.removeprefix("grad/"): value for name, value in off.items()}
            results(gaps, baseline.along(called.module, inputs, direction))
            wanted = kinks.likeliest(near, gaps.found)[:most]
        found = {}
        for place in wanted:
            if known is not None and place in known.found:
                found[place] = known.found[place]
                continue
            other = results(kinks.Flipped(place), nullcontext(inputs))
            found[place] = {name: other[name] - plain[name] for name in other}
    return Jumps(found, whole)


def _of_jump(value: Tensor) -> torch.dtype:
    """That which holds a difference: of integers, all of them."""
    return torch.float32 if value.is_floating_point() or value.is_complex() else torch.float64


def _another(
    model: Model,
    inputs: Tensors,
    cotangents: Tensors,
    way: AbstractContextManager[Tensors],
    seed: int,
) -> tuple[dict[str, Tensor | None], Choices]:
    """Results in one of the ways of the baseline, and what the model chose in it."""
    with way as moved, Choices() as choices, References():
        if moved is not inputs:
            generator = torch.Generator().manual_seed(seed)
            cotangents = baseline.moved_cotangents(cotangents, generator)
        return _results(model, model.module, moved, cotangents), choices


def _repeats(value: Tensor, before: Tensor, scale: float) -> bool:
    """Whether two runs gave the same, but for what a library's order of sums can make of it.

    Products on several threads may take another one at each call, and a baseline of both does.
    """
    if torch.equal(value, before):
        return True
    if not value.is_floating_point():
        return False
    allowed = _ROUNDINGS * torch.finfo(value.dtype).eps * scale
    return errors(value, before.double()).max_abs <= allowed


def _save(tensors: Tensors, file: Path) -> None:
    try:
        save_file(dict(tensors), file)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file}: cannot be written: {one_line(error)}") from error
