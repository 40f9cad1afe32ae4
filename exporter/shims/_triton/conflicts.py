"""Whether programs of a Triton kernel read what others store.

Where some go ways of their own, all at once, that would be another result than one after the other
gives. What a GPU gives hangs on which of them was there first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.places import Size, same
from fuseport.exporter.shims._triton.values import Value

__all__ = ["Access", "Parts", "Places", "are_apart", "do_conflict"]

Parts = tuple[tuple[Size, Size], ...]
"""For each axis of programs, how far apart the parts of a memory are that they have for themselves,
and how many there is room for; 0 where nothing bounds that."""

Places = tuple[Tensor, Tensor | None]
"""Indices, and where there are such, if not everywhere."""


@dataclass(frozen=True)
class Access:
    """Some places that a kernel reads or stores to.

    Args:
        is_stored: which of both.
        at: the places.
        mask: where there are such, of the programs that go a way.
        parts: in which each program stays in its own; None where they are not known to.
        is_certain: whether they do; else the kernel reads by numbers that it has read, with which
            it is taken to stay in the part that its program begins in.
    """

    is_stored: bool
    at: Value
    mask: Value | None
    parts: Parts | None
    is_certain: bool


def are_apart(accesses: Sequence[Access]) -> bool:
    """Whether each program stays in a part of the memory, the same for all accesses."""
    first = accesses[0].parts
    return first is not None and all(
        each.parts is not None
        and len(each.parts) == len(first)
        and all(
            same(a, b)
            for pair in zip(first, each.parts, strict=True)
            for a, b in zip(*pair, strict=True)
        )
        for each in accesses
    )


def do_conflict(
    stored: Sequence[Places], read: Sequence[Places], sizes: Sequence[int], numel: int
) -> bool:
    """Whether a program reads what another one stores, of places that are known.

    Args:
        stored, read: the places, of the axes of programs and the block.
        sizes: of the axes.
        numel: how many elements the memory has.
    """
    owner = torch.full([numel], -1, dtype=torch.int64)
    for places in stored:
        index, program = _flat(places, sizes)
        owner[index] = program
    for places in read:
        index, program = _flat(places, sizes)
        others = (owner[index] != -1) & (owner[index] != program)
        if int(others.sum()):  # by a number: a condition would be one of the model's code
            return True
    return False


def _flat(places: Places, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Places of memory and the numbers of the programs there, of one dimension."""
    index, kept = places
    block = torch.broadcast_shapes(index.shape, *([] if kept is None else [kept.shape]))
    shape = [*sizes, *block[len(sizes) :]]
    programs = torch.arange(torch.Size(sizes).numel()).view(
        *sizes, *[1] * (len(shape) - len(sizes))
    )
    index, programs = index.cpu().expand(shape), programs.expand(shape)
    if kept is None:
        return index.reshape(-1), programs.reshape(-1)
    there = kept.cpu().expand(shape)
    return index[there], programs[there]
