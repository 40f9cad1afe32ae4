"""Whether programs of a Triton kernel read what others store.

Where some go ways of their own, all at once, that would be another result than one after the other
gives. What a GPU gives hangs on which of them was there first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Access", "conflicts"]


@dataclass(frozen=True)
class Access:
    """Some places that a kernel reads or stores to.

    Args:
        is_stored: which of both.
        is_linear: whether the places are a linear function of those of a block.
        parts: how programs part the memory for it, the same for all accesses where each stays in
            its own part; None where they are not known to.
        index, kept: the places and where there are such, of the axes of programs and the block;
            None where their values are not known.
    """

    is_stored: bool
    is_linear: bool
    parts: Any
    index: Tensor | None
    kept: Tensor | None


def conflicts(accesses: Sequence[Access], sizes: Sequence[int], numel: Any) -> bool:
    """Whether a program may read what another one stores.

    Args:
        accesses: of all programs, in the order of the kernel's code.
        sizes: of the axes along which programs run at once, 0 of a dynamic one.
        numel: how many elements the memory has.
    """
    stored = [access for access in accesses if access.is_stored]
    if len(stored) in (0, len(accesses)):
        return False
    if len({access.parts for access in accesses}) == 1 and accesses[0].parts is not None:
        return False
    if all(sizes) and isinstance(numel, int) and not any(a.index is None for a in accesses):
        return _do_conflict(accesses, sizes, numel)
    # Where a program reads by a number that it has read, before anything is stored, that is taken
    # for a place of its own: values are not known to tell.
    first = accesses.index(stored[0])
    early = all(not access.is_linear for access in accesses[:first] if access.parts is None)
    late = {access.parts for access in accesses if access.is_stored or access.parts is not None}
    late |= {access.parts for access in accesses[first:]}
    return not early or None in late or len(late) > 1


def _do_conflict(accesses: Sequence[Access], sizes: Sequence[int], numel: int) -> bool:
    """The same of places that are known."""
    owner = torch.full([numel], -1, dtype=torch.int64)
    for access in (a for a in accesses if a.is_stored):
        index, program = _flat(access, sizes)
        owner[index] = program
    for access in (a for a in accesses if not a.is_stored):
        index, program = _flat(access, sizes)
        if not bool(((owner[index] == -1) | (owner[index] == program)).all()):
            return True
    return False


def _flat(access: Access, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Places of memory and the numbers of the programs there, of one dimension."""
    assert access.index is not None
    index, kept = access.index.cpu(), access.kept
    block = torch.broadcast_shapes(index.shape, *([] if kept is None else [kept.shape]))
    shape = [*sizes, *block[len(sizes) :]]
    programs = torch.arange(torch.Size(sizes).numel()).view(
        *sizes, *[1] * (len(shape) - len(sizes))
    )
    index, programs = index.expand(shape), programs.expand(shape)
    if kept is None:
        return index.reshape(-1), programs.reshape(-1)
    there = kept.cpu().expand(shape)
    return index[there], programs[there]
