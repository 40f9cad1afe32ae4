"""Sequences of a batch one by one, in a capture: what `unpack_sequence` and `unpad_sequence` give.

Of a batch of dynamic size these are as many as the example has, without values. All of them in
their order are the batch again, in `pad_sequence`, `pack_sequence` and `torch.cat`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import unpad_sequence

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program.sequences._recurrent import not_above
from fuseport.exporter.program.sizes import listed
from fuseport.exporter.program.sizes.listed import Item

__all__ = ["Sequences", "Single", "apart", "joined", "known", "padded", "sequences", "unpadded"]

_ONE_BY_ONE = (
    "the sequences of a batch of dynamic size are gone over, which has no form in a program: "
    "compute with the padded batch, or give the number instead of a name for its size"
)
_OF_BATCH = (Tensor.dtype.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
_DIM = (Tensor.dim, Tensor.ndim.__get__)  # type: ignore[attr-defined]  # descriptors
_SHAPE: Any = Tensor.shape.__get__  # type: ignore[attr-defined]
_CAT = (torch.cat, torch.concat, torch.concatenate)
_UNPAD = FunctionType(unpad_sequence.__code__, vars(rnn))  # as torch has it


class Sequences:
    """Those of a batch.

    Args:
        padded: (batch, steps, *).
        lengths: (batch,), of integers, from 0 to `steps`.
    """

    def __init__(self, padded: Tensor, lengths: Tensor) -> None:
        self.padded, self.lengths = padded, lengths

    def mask(self, steps: Any) -> Tensor:
        """(batch, steps): whether a sequence has that step."""
        return torch.arange(steps, device=self.lengths.device) < self.lengths.unsqueeze(1)


class Single(Tensor):
    """One of them: (its length, *).

    Attributes:
        among: all of them.
        place: of it in the batch.
        length: a number of the vector of lengths.
    """

    among: Sequences
    place: int
    length: Item

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise ExportFailed(_ONE_BY_ONE)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # of wider arguments


@contextmanager
def apart() -> Iterator[None]:
    """Have torch's `unpad_sequence` give such sequences, whatever name code has it by."""
    own = unpad_sequence.__code__
    unpad_sequence.__code__ = _instead.__code__
    try:
        yield
    finally:
        unpad_sequence.__code__ = own


def _instead(padded_sequences: Any, lengths: Any, batch_first: bool = False) -> Any:
    # It runs with the names of torch's module.
    from fuseport.exporter.program.sequences.unpacked import unpadded

    return unpadded(padded_sequences, lengths, batch_first)


def unpadded(x: Tensor, lengths: Tensor, batch_first: bool) -> Sequence[Tensor]:
    """`unpad_sequence`: of a batch of dynamic size, tensors without values."""
    size = x.shape[0 if batch_first else 1]
    if not isinstance(size, SymInt) or not listed.may_be_gone_over():
        found: Sequence[Tensor] = _UNPAD(x, lengths, batch_first)
        return found
    if not batch_first:
        x.transpose_(0, 1)  # which torch's own leaves so, too
    among = Sequences(x, lengths.clamp(min=0, max=x.shape[1]))
    return [_single(among, *each) for each in enumerate(listed.numbers(among.lengths))]


def _single(among: Sequences, place: int, length: Item) -> Single:
    one: Single = Tensor._make_wrapper_subclass(
        Single, (0,), dtype=among.padded.dtype, device=among.padded.device
    )
    one.among, one.place, one.length = among, place, length
    return one


def known(func: Any, args: Sequence[Any]) -> Any:
    """What is known of a sequence without its values; None of what is not."""
    if not args or not isinstance(args[0], Single):
        return None
    (one, *others), like = args, args[0].among.padded
    shape = one.length, *like.shape[2:]
    if func in _OF_BATCH:
        return func(like)
    if func in _DIM:
        return len(shape)
    if func == _SHAPE or (func == Tensor.size and not others):
        return shape
    if func == Tensor.size and isinstance(others[0], int):
        return shape[others[0]]
    return None


def sequences(tensors: Any) -> Sequences | None:
    """The batch that all of some tensors are, one after another; None of others."""
    if type(tensors) not in (list, tuple) or not tensors:
        return None
    first = tensors[0]
    if not all(isinstance(one, Single) and one.among is first.among for one in tensors):
        return None
    count: Any = first.among.lengths.shape[0]
    if [one.place for one in tensors] != list(range(count.node.hint)):
        return None
    found: Sequences = first.among
    return found


def padded(given: Sequences, batch_first: bool, padding_value: float, side: str) -> Tensor:
    """`pad_sequence` of them: (batch, longest, *), or the steps first."""
    if side != "right":
        raise ExportFailed(_ONE_BY_ONE)
    longest: Any = given.lengths.max().item()
    torch._check(longest >= 0)
    not_above(longest, given.padded.shape[1])
    x = given.padded[:, :longest]
    mask = given.mask(longest).reshape(x.shape[0], longest, *[1] * (x.dim() - 2))
    x = torch.where(mask, x, torch.full_like(x, padding_value))
    return x if batch_first else x.transpose(0, 1)


def joined(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """`torch.cat` of them along their steps, (sum of lengths, *); None of others."""
    if func not in _CAT or (found := sequences(args[0] if args else kwargs["tensors"])) is None:
        return None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim % (found.padded.dim() - 1):
        return None
    where = found.mask(found.padded.shape[1]).flatten().nonzero().squeeze(1)
    return found.padded.flatten(0, 1).index_select(0, where)
