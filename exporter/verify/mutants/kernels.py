"""Mistakes of kernels, derived for any operator: of what they return, and of what they read.

`outputs` and `inputs` make kinds of a change to one tensor; the others need more than one.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fuseport.exporter.verify.mutants.kinds import Place, Seen
from fuseport.ops.spec import Inputs, Outputs, Run

__all__ = [
    "another_gradient",
    "as_the_cotangent",
    "cotangent_of_ones",
    "detached",
    "first_cotangent_alone",
    "first_of_batch_alone",
    "flag_fixed",
    "input_changed",
    "inputs",
    "kept_results",
    "number_off",
    "outputs",
    "swapped_inputs",
    "third_call",
    "threads",
    "unrepeatable",
]

Edit = Callable[[Tensor], Tensor]
Holds = Callable[[Tensor], bool]
Places = Callable[[Seen], Iterator[Place]]


def outputs(edit: Edit, holds: Holds = lambda t: True) -> Places:
    """Each output that is so in some case, edited."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        return {**found, name: edit(found[name]) if found[name].numel() else found[name]}

    def places(seen: Seen) -> Iterator[Place]:
        for name in seen.outputs_where(holds):
            yield name, partial(change, name)

    return places


def inputs(edit: Edit, holds: Holds = lambda t: True) -> Places:
    """Each floating input that is so in some case, edited before it is read."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        value = given[name]
        return right({**given, name: edit(value) if value.numel() else value})

    def places(seen: Seen) -> Iterator[Place]:
        for name in seen.inputs_where(holds):
            yield name, partial(change, name)

    return places


def swapped_inputs(seen: Seen) -> Iterator[Place]:
    """Two inputs that look alike, each read for the other."""

    def change(one: str, other: str, right: Run, given: Inputs) -> Outputs:
        if not _alike(given[one], given[other]):
            return right(given)
        return right({**given, one: given[other], other: given[one]})

    for one, other in itertools.combinations(seen.floating_inputs, 2):
        if any(_alike(given[one], given[other]) for given, _ in seen.examples):
            yield f"{one} and {other}", partial(change, one, other)


def another_gradient(seen: Seen) -> Iterator[Place]:
    """Two outputs that look alike, each returned for the other."""

    def change(one: str, other: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        if not _alike(found[one], found[other]):
            return found
        return {**found, one: found[other], other: found[one]}

    for one, other in itertools.combinations(seen.floating_outputs, 2):
        if any(_alike(found[one], found[other]) for _, found in seen.examples):
            yield f"{one} and {other}", partial(change, one, other)


def as_the_cotangent(seen: Seen) -> Iterator[Place]:
    """A cotangent, returned for a gradient that looks like it."""

    def change(cotangent: str, name: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        if not _alike(given[cotangent], found[name]):
            return found
        return {**found, name: found[name].clone().copy_(given[cotangent])}

    for cotangent in _cotangents(seen):
        for name in seen.floating_outputs:
            if any(_alike(given[cotangent], found[name]) for given, found in seen.examples):
                yield f"{name} = {cotangent}", partial(change, cotangent, name)


def cotangent_of_ones(seen: Seen) -> Iterator[Place]:
    """A cotangent taken for ones, as `.sum().backward()` has it."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        return right({**given, name: torch.ones_like(given[name])})

    for name in _cotangents(seen):
        yield name, partial(change, name)


def first_cotangent_alone(seen: Seen) -> Iterator[Place]:
    """A cotangent forgotten, where there are several."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        return right({**given, name: torch.zeros_like(given[name])})

    cotangents = _cotangents(seen)
    for name in cotangents if len(cotangents) > 1 else ():
        yield name, partial(change, name)


def first_of_batch_alone(seen: Seen) -> Iterator[Place]:
    """A gradient that is a sum over the batch, of its first entry alone: a missing reduction."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        cut = {n: _first(given[n]) for n in _cotangents(seen)}
        return {**right(given), name: right({**given, **cut})[name]}

    for name in seen.floating_outputs:
        if any(_summed(given, found, name, _cotangents(seen)) for given, found in seen.examples):
            yield name, partial(change, name)


def flag_fixed(seen: Seen) -> Iterator[Place]:
    """A flag that is not read: it is as if it were always off, or always on."""

    def change(name: str, value: bool, right: Run, given: Inputs) -> Outputs:
        return right({**given, name: value})

    for name in seen.operator.inputs:
        values = {given[name] for given, _ in seen.examples if isinstance(given[name], bool)}
        for value in (False, True):
            if (not value) in values:
                yield f"{name} always {value}", partial(change, name, value)


def number_off(seen: Seen) -> Iterator[Place]:
    """A number such as an epsilon, ten times what is given."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        return right({**given, name: given[name] * 10})

    for name in seen.operator.inputs:
        if any(isinstance(given[name], float) and given[name] for given, _ in seen.examples):
            yield name, partial(change, name)


def kept_results(seen: Seen) -> Iterator[Place]:
    """What was computed first for these sizes, at every call with such sizes."""
    kept: dict[object, Outputs] = {}

    def change(right: Run, given: Inputs) -> Outputs:
        key = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in given.values())
        found = kept.setdefault(key, right(given))
        return {name: t.clone() for name, t in found.items()}

    yield "all outputs", change


def third_call(seen: Seen) -> Iterator[Place]:
    """Right twice, and wrong in the third call, the sixth and so on."""
    for name in seen.floating_outputs:
        calls = itertools.count(1)

        def change(
            right: Run, given: Inputs, name: str = name, calls: Iterator[int] = calls
        ) -> Outputs:
            found = right(given)
            return found if next(calls) % 3 else {**found, name: found[name].mul(1.01)}

        yield name, change


def threads(seen: Seen) -> Iterator[Place]:
    """Sums whose order depends on the number of threads: another last place."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        one = torch.get_num_threads() == 1
        return found if one else {**found, name: _last_place(found[name])}

    for name in seen.floating_outputs:
        yield name, partial(change, name)


def unrepeatable(seen: Seen) -> Iterator[Place]:
    """Sums whose order depends on the run, as threads finish: another last place at times."""
    for name in seen.floating_outputs:
        generator = torch.Generator().manual_seed(0)

        def change(
            right: Run, given: Inputs, name: str = name, generator: torch.Generator = generator
        ) -> Outputs:
            found = right(given)
            moved = bool(torch.rand((), generator=generator) < 0.5)
            return {**found, name: _last_place(found[name])} if moved else found

        yield name, change


def input_changed(seen: Seen) -> Iterator[Place]:
    """An input is written to."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        if given[name].is_contiguous():
            given[name].mul_(0.5)
        return found

    for name in seen.floating_inputs:
        yield name, partial(change, name)


def detached(seen: Seen) -> Iterator[Place]:
    """An input cut off before autograd sees it. Of the kernel of autograd, not of the CPU."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        return right({**given, name: given[name].detach()})

    if not seen.is_gradient:
        for name in seen.spec.differentiable(seen.operator)[0]:
            yield name, partial(change, name)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.numel() > 0


def _cotangents(seen: Seen) -> list[str]:
    """The inputs of a gradient's operator that are cotangents."""
    owners = [o for o in seen.spec.operators if o.backward == seen.operator.name]
    names = {f"d{output}" for owner in owners for output in owner.outputs}
    return [name for name in seen.floating_inputs if name in names]


def _first(t: Tensor) -> Tensor:
    found = torch.zeros_like(t)
    if t.dim() and len(t):
        found[:1] = t[:1]
    return found


def _summed(given: Inputs, found: Outputs, name: str, cotangents: list[str]) -> bool:
    """Whether a gradient has no dimension for the cotangent's first, which has several entries."""
    batches = {len(given[c]) for c in cotangents if given[c].dim()}
    return all(b > 1 and b not in found[name].shape[:1] for b in batches) and bool(batches)


def _last_place(t: Tensor) -> Tensor:
    """The first element that is not zero moved to the next number."""
    found = t.clone()
    flat = found.select(0, 0) if found.dim() else found
    while flat.dim():
        flat = flat.select(0, 0)
    part = torch.view_as_real(flat)[0] if flat.is_complex() else flat
    infinite = torch.full_like(part, float("inf"))
    part.copy_(torch.nextafter(part, infinite))
    return found
