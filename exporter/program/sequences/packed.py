"""Packed sequences in a capture: `pack_padded_sequence` and what is made of it, of any lengths.

A `PackedSequence` has the values of all sequences one after another, as many as the lengths add up
to. Here it stays what it was before, padded, in tensors that have no values until something other
than a recurrent layer or `pad_packed_sequence` asks for them; then these are selected by a mask.
"""

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import CodeType, FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.nn.modules import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program.matching import ASSERT
from fuseport.exporter.program.refusing import HOLDS
from fuseport.exporter.program.sequences import unpacked
from fuseport.exporter.program.sequences._recurrent import (
    at_most,
    is_layer,
    lengthened,
    not_above,
    over_steps,
)
from fuseport.exporter.program.sizes.listed import of_list, vector_of

__all__ = ["Packing", "Unmade", "packing", "with_values"]

_Size = Any  # int | SymInt; what takes one takes the other, but for torch's stubs

_PACK = torch._VF._pack_padded_sequence
_PAD = torch._VF._pad_packed_sequence
_PACK_CODE, _PAD_CODE = pack_padded_sequence.__code__, pad_packed_sequence.__code__
_PAD_TENSORS = torch._C._nn.pad_sequence
_DTYPE: Any = Tensor.dtype.__get__  # type: ignore[attr-defined]  # it is a descriptor
_DEVICE: Any = Tensor.device.__get__
_DIM = (Tensor.dim, Tensor.ndim.__get__)  # type: ignore[attr-defined]

_ORDERING = (torch.as_tensor, torch.sort)
_NEAR = 8  # calls, of modes and what is here

_LENGTHS = (
    "the lengths of a packed sequence are in decreasing order, none below 1, and none above the "
    "steps that there are"
)
_BY_HAND = (
    "a packed sequence is made by hand, of sizes of batches that pack_padded_sequence has not "
    "given: these depend on values; pack what is padded by that function"
)
_TRAINING = "dropout between layers over a packed sequence: export the model in eval mode"


class _Lengths:
    """How long the sequences of a batch are.

    Attributes:
        each: (batch,), int64, in decreasing order, from 1 on.
        steps: of the padded batch: at least the longest.
    """

    def __init__(self, each: Tensor, steps: _Size) -> None:
        self.each, self.steps = each, steps
        places = torch.arange(steps, device=each.device)
        self._mask = places.unsqueeze(1) < each
        self._longest: _Size | None = None
        self._places: Tensor | None = None

    @property
    def batch(self) -> _Size:
        """How many sequences there are."""
        return self.each.shape[0]

    @property
    def longest(self) -> _Size:
        """A size that hangs on values."""
        if self._longest is None:
            longest: Any = self.each[0].item()
            torch._check(longest >= 1)
            not_above(longest, self.steps)
            self._longest = longest
        return self._longest

    @property
    def places(self) -> Tensor:
        """(sum of lengths,): where in a padded batch, as one row of steps, packed values are."""
        if self._places is None:
            self._places = self._mask.flatten().nonzero().squeeze(1)
        return self._places

    def batch_sizes(self) -> Tensor:
        """(longest,): how many sequences have a step."""
        return self._mask.sum(1)[: self.longest]

    def mask(self, dims: int = 2) -> Tensor:
        """(steps, batch, 1, …): whether a sequence has that step."""
        return self._mask.reshape(*self._mask.shape, *[1] * (dims - 2))


class Unmade(Tensor):
    """A tensor of a packed sequence whose values are computed when something asks for them.

    Attributes:
        lengths: of the sequences.
        made: the values, once they are there, and the version that they were made in.
    """

    lengths: _Lengths
    made: tuple[Tensor, int] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise ExportFailed("a packed sequence is in use where torch's functions are not seen")

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # of wider arguments


class _Data(Unmade):
    """The values of a packed sequence: (sum of lengths, *).

    Attributes:
        padded: (steps, batch, *); what is past the lengths counts for nothing, and is finite.
    """

    padded: Tensor


class _BatchSizes(Unmade):
    """How many sequences have each step: (longest,), int64."""


def _data(padded: Tensor, lengths: _Lengths) -> _Data:
    data: _Data = Tensor._make_wrapper_subclass(
        _Data, (0,), dtype=padded.dtype, device=padded.device
    )
    data.padded, data.lengths, data.made = padded, lengths, None
    return data


def _batch_sizes(lengths: _Lengths) -> _BatchSizes:
    sizes: _BatchSizes = Tensor._make_wrapper_subclass(
        _BatchSizes, (0,), dtype=torch.int64, device=lengths.each.device
    )
    sizes.lengths, sizes.made = lengths, None
    return sizes


def with_values(given: Any) -> Any:
    """The same, of whatever holds tensors, but those of packed sequences with their values."""
    return pytree.tree_map(_with_values, given)


def _with_values(x: Any) -> Any:
    if isinstance(x, unpacked.Single):
        x.clone()  # which it refuses
    if not isinstance(x, Unmade):
        return x
    if x.made is None:
        if isinstance(x, _Data):
            made = x.padded.flatten(0, 1).index_select(0, x.lengths.places)
        else:
            made = x.lengths.batch_sizes()
        x.made = made, made._version
    return x.made[0]


def _is_written(x: Unmade) -> bool:
    """Whether something was written into the values since they were made."""
    return x.made is not None and x.made[0]._version != x.made[1]


@contextmanager
def packing() -> Iterator[None]:
    """Have torch's recurrent layers make no number of the batch of a packed sequence.

    Of others than `pack_padded_sequence` has made they would ask for values.
    """
    check = rnn.RNNBase.check_input

    def check_input(layer: rnn.RNNBase, x: Tensor, batch_sizes: Tensor | None) -> None:
        if batch_sizes is not None:
            _lengths(batch_sizes)
        check(layer, x, batch_sizes)

    with (
        mock.patch.object(rnn, "int", _whole, create=True),
        mock.patch.object(rnn.RNNBase, "check_input", check_input),
        unpacked.apart(),
    ):
        yield


def _whole(value: Any) -> Any:
    return value if isinstance(value, SymInt) else builtins.int(value)


class Packing:
    """What functions of torch's return of packed sequences, in one capture."""

    def __init__(self) -> None:
        # What was made of tensors, which keep their ids here, and of which version of them.
        self._made: dict[tuple[Any, ...], tuple[Tensor, int, Any]] = {}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function returns; NotImplemented where it takes values: see `with_values`.

        Raises:
            ExportFailed: it can be told for those alone that `pack_padded_sequence` has made.
        """
        if func is _PACK:
            return self._pack(*args, **kwargs)
        if func in _ORDERING and _within(_PACK_CODE) is not None:
            return self._ordered(func, args, kwargs)
        if func is _PAD_TENSORS:
            return _pad_tensors(*args, **kwargs)
        if func is _PAD:
            return _pad(*args, **kwargs)
        if is_layer(func) and len(args) == 9 and not isinstance(args[3], bool):
            return _layers(func, *args)
        for of in (_known(func, args), unpacked.known(func, args)):
            if of is not None:
                return of
        joined = unpacked.joined(func, args, kwargs)
        return NotImplemented if joined is None else joined

    def _ordered(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lengths as a tensor, or in order: what is packed by the same has the same."""
        given = args[0]
        of = given if isinstance(given, Tensor) else vector_of(given)
        if of is None:
            return NotImplemented

        def make() -> Any:
            return func(*args, **kwargs) if of is given else of_list(func, args, kwargs)

        return self._once(of, (func,), make)

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        if batch_first:
            x = x.transpose(0, 1)
        steps, batch = x.shape[:2]
        torch._check(lengths.dim() == 1)
        torch._check(lengths.shape[0] == batch)

        def make() -> _Lengths:
            before = torch.cat([lengths[:1], lengths[:-1]])
            right = (lengths <= before) & (lengths >= 1) & (lengths <= steps)
            ASSERT(right.all(), f"{HOLDS} {_LENGTHS}")
            return _Lengths(lengths, steps)

        if (most := at_most(steps)) is not None:
            if not self._is_longest_of(lengths, most, steps):
                ASSERT((lengths <= steps).all(), f"{HOLDS} {_LENGTHS}")
            x, steps = lengthened(x, most), most
        found: _Lengths = self._once(lengths, (_PACK, str(steps)), make)
        # What is past a sequence's end may be anything, also what no gradient comes through.
        padded = torch.where(found.mask(x.dim()), x, torch.zeros_like(x))
        return _data(padded, found), _batch_sizes(found)

    def _is_longest_of(self, lengths: Tensor, most: _Size, steps: _Size) -> bool:
        """Whether a number of steps is what the longest of such lengths has."""
        known = self._made.get((id(lengths), _PACK, str(most)))
        if known is None or known[1] != lengths._version:
            return False
        return _are_one(known[2].longest, steps)

    def _once(self, of: Tensor, what: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What is made of a tensor, once as long as nothing is written into it."""
        key = (id(of), *what)
        if key not in self._made or self._made[key][1] != of._version:
            self._made[key] = of, of._version, make()
        return self._made[key][2]


def _known(func: Any, args: Sequence[Any]) -> Any:
    """What is known of a tensor of a packed sequence without its values."""
    first = args[0] if args else None
    if isinstance(first, _Data):
        if func in (_DTYPE, _DEVICE):
            return func(first.padded)
        if func in _DIM:
            return first.padded.dim() - 1
        if func == Tensor.size and len(args) == 2 and (at := args[1] % (first.padded.dim() - 1)):
            return first.padded.shape[at + 1]
    if isinstance(first, _BatchSizes):
        if func == _DEVICE:
            return first.lengths.each.device
        if func == Tensor.__getitem__ and isinstance(args[1], int) and args[1] == 0:
            return first.lengths.batch
        if func == Tensor.size and len(args) == 2:
            return _longest(first.lengths)
    return None


def _within(code: CodeType) -> FrameType | None:
    """The call of a function of torch's that this is part of."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code is code:
            return frame
        frame = frame.f_back
    return None


def _longest(lengths: _Lengths) -> _Size:
    """How many steps there are; `pad_packed_sequence` compares that with a `total_length`."""
    longest: Any = lengths.longest
    call = _within(_PAD_CODE)
    total = None if call is None else call.f_locals["total_length"]
    if total is not None and not _are_one(total, lengths.steps):
        ASSERT(lengths.each[0] <= total, f"{HOLDS} no packed sequence is longer than total_length")
        torch._check(longest <= total)
    return longest


def _padded(data: Tensor, sizes: Tensor) -> tuple[Tensor, _Lengths]:
    """(steps, batch, *), and the lengths, of a packed sequence's tensors."""
    lengths = _lengths(sizes)
    if isinstance(data, _Data) and data.lengths is lengths and not _is_written(data):
        return data.padded, lengths
    data = _with_values(data)
    flat = lengths.mask().flatten()
    if not _are_one(data.shape[0], lengths.places.shape[0]):
        right = torch.scalar_tensor(data.shape[0], dtype=torch.int64) == flat.sum()
        ASSERT(right, f"{HOLDS} a packed sequence has as many values as its lengths add up to")
    places = (flat.cumsum(0) - 1).clamp(min=0)
    padded = data.index_select(0, places).unflatten(0, (lengths.steps, lengths.batch))
    mask = lengths.mask(padded.dim())
    return torch.where(mask, padded, torch.zeros_like(padded)), lengths


def _lengths(sizes: Tensor) -> _Lengths:
    if not isinstance(sizes, _BatchSizes) or _is_written(sizes):
        raise ExportFailed(_BY_HAND)
    return sizes.lengths


def _are_one(size: _Size, other: _Size) -> bool:
    """Whether two sizes are known to be the same."""
    both = [s.node.expr if isinstance(s, SymInt) else s for s in (size, other)]
    return bool(both[0] == both[1])


def _pad(
    data: Tensor,
    sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: _Size,
) -> tuple[Tensor, Tensor]:
    padded, lengths = _padded(data, sizes)
    mask = lengths.mask(padded.dim())
    if _are_one(total_length, lengths.longest):
        padded, mask = padded[:total_length], mask[:total_length]
    elif not _are_one(total_length, lengths.steps):
        places = torch.arange(total_length, device=padded.device)
        there = places.clamp(max=lengths.steps - 1)
        padded, mask = padded.index_select(0, there), mask.index_select(0, there)
        mask = mask & (places == there).reshape(-1, *[1] * (mask.dim() - 1))
    padded = torch.where(mask, padded, torch.full_like(padded, padding_value))
    return padded.transpose(0, 1) if batch_first else padded, lengths.each.clone()


def _layers(
    func: Any,
    data: Tensor,
    sizes: Tensor,
    first: Any,
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both: bool,
) -> tuple[Tensor, ...]:
    if training and dropout:
        raise ExportFailed(_TRAINING)
    padded, lengths = _padded(data, sizes)
    mask = lengths.mask(padded.dim())
    y, *last = over_steps(func, padded, first, weights, biased, layers, both, mask)
    return (_data(y, lengths), *last)


def _pad_tensors(
    tensors: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    if (of_batch := unpacked.sequences(tensors)) is not None:
        return unpacked.padded(of_batch, batch_first, padding_value, padding_side)
    # Torch's asks which is the longest.
    lengths = [x.shape[0] for x in tensors]
    if all(isinstance(length, int) for length in lengths):
        return NotImplemented
    longest = reduce(torch.sym_max, lengths)
    whole = []
    for x in tensors:
        more = longest - x.shape[0]
        sides = (more, 0) if padding_side == "left" else (0, more)
        whole.append(F.pad(x, (*[0] * 2 * (x.dim() - 1), *sides), value=padding_value))
    return torch.stack(whole, 0 if batch_first else 1)
