"""Numbers of a vector of dynamic length, in a capture, in what model code makes of them in Python.

Torch has no form of `lengths.tolist()` there: a list has as many items as the example. `Listed`
stands for the vector, in what code makes of such lists: its length, the largest of it, a tensor
again. Where code goes over a vector, as in `[int(n) // 2 for n in lengths]`, it has as many items
as the example has, each of which remembers what is computed of it; all of them in their order are
a vector again. What else hangs on one of them cannot be captured.
"""

import builtins
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseport.exporter.program.sizes import _known
from fuseport.exporter.program.sizes._ranges_of_numbers import known

__all__ = ["Item", "Listed", "listing", "may_be_gone_over", "numbers", "of_list", "vector_of"]

_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": torch.max,
    "min": torch.min,
    "sum": torch.sum,
}


class _GoneOver:
    """What code has gone over in a capture.

    Attributes:
        vectors: all of them, in the order of that.
        made: what was made of vectors, by which of these and how.
    """

    def __init__(self, vectors: list[Tensor]) -> None:
        self.vectors = vectors
        self.made: dict[tuple[Any, ...], Tensor] = {}


class _State:
    """Of the capture that is going on; None where nothing may be gone over."""

    now: _GoneOver | None = None


class Listed(list[Any]):
    """The integers of a vector, as model code has them in a list.

    Attributes:
        tensor: (n,), of integers; n is dynamic.
    """

    def __init__(self, tensor: Tensor) -> None:
        """What goes over a list by C finds one item, of which it can make nothing."""
        super().__init__([_NoNumber()])
        self.tensor = tensor

    def __len__(self) -> int:
        """Of the example."""
        return int(self.tensor.shape[0])

    def __iter__(self) -> Iterator[Any]:
        """As many numbers as the example has.

        Raises:
            TypeError: something has hung on one of them before.
        """
        return iter(numbers(self.tensor))

    def __getitem__(self, index: Any) -> Any:
        """One, a number that hangs on values; or some, in a list again."""
        if isinstance(index, slice):
            return Listed(self.tensor[index])
        return self.tensor[index].item()


def _refusing(*_: Any, **__: Any) -> NoReturn:
    _refuse()


for _name in (
    *("__add__", "__contains__", "__delitem__", "__eq__", "__ge__", "__gt__", "__iadd__"),
    *("__imul__", "__le__", "__lt__", "__mul__", "__ne__", "__reversed__", "__rmul__"),
    *("__setitem__", "append", "clear", "copy", "count", "extend", "index", "insert", "pop"),
    *("remove", "reverse", "sort"),
):
    setattr(Listed, _name, _refusing)  # what a list's own would do with the one item


class _NoNumber:
    def __eq__(self, other: object) -> NoReturn:  # else it is decided by which object it is
        _refuse()

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<a list of dynamic length>"

    def __index__(self) -> int:
        _refuse()

    __int__ = __float__ = __bool__ = __index__


def _computing(function: Callable[..., Any], *others: Any) -> Callable[..., Any]:
    def method(item: "Item", *more: Any) -> Any:
        given = (*others, *more)
        if not all(type(each) is int for each in given):
            return NotImplemented
        return Item(item.vector, item.place, (*item.steps, (function, given)))

    return method


def _quotient(x: Tensor, by: int) -> Tensor:
    return x.double() / by


def _floor(x: Tensor) -> Tensor:
    return x.floor().long()


def _ceil(x: Tensor) -> Tensor:
    return x.ceil().long()


def _from(x: Tensor, other: int) -> Tensor:
    return other - x


class Item(_NoNumber):
    """A number of a vector, or what code has computed of it.

    Attributes:
        vector: all of them.
        place: which it is.
        steps: functions of the vector, and what they take beside it, one after another.
    """

    def __init__(self, vector: Tensor, place: int, steps: tuple[Any, ...] = ()) -> None:
        self.vector, self.place, self.steps = vector, place, steps
        self._version = vector._version

    def item(self) -> "Item":
        """As of a tensor of one value."""
        return self

    def whole(self) -> "Item":
        """`int` of it."""
        return Item(self.vector, self.place, (*self.steps, (Tensor.long, ())))

    __add__ = __radd__ = _computing(operator.add)
    __mul__ = __rmul__ = _computing(operator.mul)
    __sub__, __rsub__ = _computing(operator.sub), _computing(_from)
    __floordiv__, __truediv__ = _computing(operator.floordiv), _computing(_quotient)
    __mod__, __neg__ = _computing(operator.mod), _computing(operator.neg)
    __floor__, __ceil__ = _computing(_floor), _computing(_ceil)

    def is_as_it_was(self) -> bool:
        """Whether nothing was written into the vector since."""
        return self.vector._version == self._version


def _refuse() -> NoReturn:
    raise TypeError(
        "the items of a list of dynamic length are gone over, which has no form in a program; "
        "compute with the tensor that it was made of"
    )


@contextmanager
def listing(one_by_one: bool, gone_over: list[Tensor]) -> Iterator[None]:
    """Have `tolist` give such lists in a capture, and what goes over vectors such numbers.

    Args:
        one_by_one: whether vectors may be gone over.
        gone_over: takes up those that are.
    """
    now = _GoneOver(gone_over) if one_by_one else None
    with ExitStack() as stack:
        for kind in (FakeTensor, FunctionalTensor):
            stack.enter_context(mock.patch.object(kind, "tolist", _or_listed(kind.tolist)))
            if one_by_one:
                stack.enter_context(mock.patch.object(kind, "__iter__", _or_items(kind.__iter__)))
        for name, reduced in _REDUCED.items():  # which torch replaces in a capture, too
            other = _or_reduced(getattr(builtins, name), reduced)
            stack.enter_context(mock.patch.object(builtins, name, other))
        for name in ("__mul__", "__rmul__"):
            repeated = _or_repeated(getattr(SymInt, name))
            stack.enter_context(mock.patch.object(SymInt, name, repeated))
        stack.enter_context(mock.patch.object(_State, "now", now))
        yield


def may_be_gone_over() -> bool:
    """Whether code may go over vectors in the capture that is going on."""
    return _State.now is not None


def numbers(vector: Tensor) -> list[Item]:
    """The numbers of a vector of integers, as many as the example has.

    Raises:
        TypeError: none may be gone over.
    """
    if _State.now is None:
        _refuse()
    _State.now.vectors.append(vector)
    size: Any = vector.shape[0]
    return [Item(vector, place) for place in range(int(size.node.hint))]


def vector_of(given: Any) -> Tensor | None:
    """The vector whose numbers a list has, or what was computed of each in one way; else None."""
    if isinstance(given, Listed):
        return given.tensor
    if _State.now is None or not isinstance(given, list | tuple) or not given:
        return None
    first = given[0]
    if not isinstance(first, Item) or not all(isinstance(each, Item) for each in given):
        return None
    size: Any = first.vector.shape[0]
    alike = all(
        each.vector is first.vector and each.steps == first.steps and each.is_as_it_was()
        for each in given
    )
    if not alike or [each.place for each in given] != list(range(int(size.node.hint))):
        return None
    key = id(first.vector), first.vector._version, first.steps
    if key not in _State.now.made:
        _State.now.made[key] = reduce(_computed, first.steps, first.vector)
    return _State.now.made[key]


def _computed(x: Tensor, step: tuple[Callable[..., Tensor], tuple[int, ...]]) -> Tensor:
    function, others = step
    return function(x, *others)


def _or_listed(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def tolist(x: Tensor) -> Any:
        if (made := known(x)) is not None:
            return made
        if (value := _known.value(x)) is not None:
            return value.tolist()
        return Listed(x) if _is_vector(x) else own(x)

    return tolist


def _or_items(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def over(x: Tensor) -> Any:
        return iter(numbers(x)) if _is_vector(x) else own(x)

    return over


def _is_vector(x: Tensor) -> bool:
    """Whether it is one of integers, as many as an input has of something."""
    whole = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    return whole and x.dim() == 1 and _is_of_inputs(x.shape[0])


def _or_reduced(own: Callable[..., Any], reduced: Callable[[Tensor], Tensor]) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            given = list(args[0]) if isinstance(args[0], Iterator) else args[0]
            vector = vector_of(given)
            return own(given) if vector is None else reduced(vector).item()
        return own(*args, **kwargs)

    return function


def _or_repeated(own: Callable[[Any, Any], Any]) -> Any:
    """`[length] * batch`: one number for each."""

    def multiplied(size: Any, other: Any) -> Any:
        if isinstance(other, list) and _is_of_inputs(size) and _is_number(other):
            return Listed(torch.full((size,), other[0], dtype=torch.int64))
        return own(size, other)

    return multiplied


def _is_number(given: Sequence[Any]) -> bool:
    return len(given) == 1 and type(given[0]) in (int, SymInt)


def _is_of_inputs(size: Any) -> bool:
    known = isinstance(size, SymInt) and not size.node.expr.is_number
    return known and not free_unbacked_symbols(size)


def of_list(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that torch is asked to make of such a list; None if it is asked for others."""
    if func in (torch.tensor, torch.as_tensor):
        like, given = None, args[0] if args else kwargs.get("data")
    elif func in (Tensor.new, Tensor.new_tensor) and len(args) == 2:
        like, given = args
    else:
        return None
    vector = vector_of(given)
    if vector is None:
        return None
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    return vector.to(device=device, dtype=dtype or torch.int64, copy=True)
