"""Mistakes of fakes, derived for any operator: what compilers are told of an output is wrong."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.verify.mutants.kinds import Place, Seen
from fuseport.exporter.verify.op_check.subject import tensors
from fuseport.ops.spec import Inputs, Outputs, Run

__all__ = ["baked_in", "careless", "outputs", "reads_values", "strides_of_input", "swapped"]

Edit = Callable[[Tensor], Tensor]


def outputs(edit: Edit, rank: int = 0) -> Callable[[Seen], Iterator[Place]]:
    """Each output of a rank or more, edited, where another shape, dtype or strides come of it."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        return {**found, name: _edited(found[name])}

    def _edited(t: Tensor) -> Tensor:
        return edit(t) if t.dim() >= rank else t

    def places(seen: Seen) -> Iterator[Place]:
        for name in seen.operator.outputs:
            if any(_facts(_edited(f[name])) != _facts(f[name]) for _, f in seen.examples):
                yield name, partial(change, name)

    return places


def strides_of_input(seen: Seen) -> Iterator[Place]:
    """An output by `empty_like` of an input, whose strides the kernel does not follow so."""

    def like(t: Tensor, of: Tensor) -> Tensor:
        return torch.empty_like(of, dtype=t.dtype) if t.shape == of.shape else t

    def change(name: str, of: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        return {**found, name: like(found[name], given[of])}

    for name in seen.operator.outputs:
        for of in seen.floating_inputs:
            if any(_facts(like(f[name], g[of])) != _facts(f[name]) for g, f in seen.examples):
                yield f"{name} like {of}", partial(change, name, of)
                break  # one is enough: another input's strides are the same mistake


def swapped(seen: Seen) -> Iterator[Place]:
    """Two outputs, each in the other's place, where that can be told."""

    def change(one: str, other: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        return {**found, one: found[other], other: found[one]}

    for one, other in itertools.combinations(seen.operator.outputs, 2):
        if any(_facts(f[one]) != _facts(f[other]) for _, f in seen.examples):
            yield f"{one} and {other}", partial(change, one, other)


def baked_in(seen: Seen) -> Iterator[Place]:
    """The sizes of the first call, at every call."""

    for name in seen.operator.outputs:
        kept: list[tuple[int, ...]] = []

        def change(
            right: Run, given: Inputs, name: str = name, kept: list[tuple[int, ...]] = kept
        ) -> Outputs:
            found = right(given)
            if not kept:
                kept.append(tuple(map(int, found[name].shape)))
            return {**found, name: found[name].new_empty(kept[0])}

        if len({f[name].shape for _, f in seen.examples}) > 1:
            yield name, change


def reads_values(seen: Seen) -> Iterator[Place]:
    """What it says depends on the values of an input."""

    def change(name: str, right: Run, given: Inputs) -> Outputs:
        found = right(given)
        if given[name].sum() > 0:
            return found
        return {n: t.clone() for n, t in found.items()}

    for name in seen.floating_inputs[:1]:
        yield name, partial(change, name)


def careless(seen: Seen) -> Iterator[Place]:
    """Wrong inputs are not refused, as the kernel refuses them."""
    kept: list[Outputs] = []

    def change(right: Run, given: Inputs) -> Outputs:
        try:
            found = right(given)
        except ValueError:
            like = next(iter(tensors(given).values()))
            return {n: like.new_empty(t.shape, dtype=t.dtype) for n, t in kept[0].items()}
        return found

    kept.append(seen.examples[0][1])
    yield "all inputs", change


def _facts(t: Tensor) -> tuple[Any, ...]:
    used = [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and t.numel()]
    return tuple(t.shape), t.dtype, used
