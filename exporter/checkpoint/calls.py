"""What the calls in a pickle may be given; what would allocate by numbers is held to the file.

torch's weights-only unpickler calls what it allows with any arguments: `bytearray(2**40)` is a
terabyte, and a tensor whose sizes reach beyond its storage makes the storage larger, with whatever
the memory had.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuseport.exporter.checkpoint.opcodes import LongText

__all__ = ["EMPTY", "TEXT", "UNKNOWN", "Global", "Storage", "Tensor", "Tuple", "called"]

# Hashing a tuple recurses without a limit of its own, and visits a shared part each time it occurs.
_TUPLE_DEPTH = 64
_TUPLE_SIZE = 1_000_000
_RANK = 64
_ELEMENTS = 2**60


@dataclass(frozen=True)
class Global:
    """Something that the pickle imports, `module.attribute`."""

    name: str


@dataclass(frozen=True)
class Storage:
    """What a tensor's numbers are read from.

    Attributes:
        item: bytes of one number.
        bytes: of all.
    """

    item: int
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor; `expanded` if it has more numbers than its storage, by strides of 0."""

    expanded: bool = False


class Tuple(tuple[object, ...]):
    """A tuple that knows how much it unfolds to: as a key it is hashed, which visits all of it."""

    depth: int = 1
    size: int = 1

    @classmethod
    def of(cls, items: Sequence[object]) -> "Tuple":
        """The tuple of these items.

        Raises:
            ValueError: it nests or unfolds beyond any checkpoint's.
        """
        result = cls(items)
        inner = [item for item in items if isinstance(item, Tuple)]
        if items:
            result.depth = 1 + max((item.depth for item in inner), default=0)
            result.size = 1 + len(items) + sum(item.size for item in inner)
        if result.depth > _TUPLE_DEPTH or result.size > _TUPLE_SIZE:
            raise ValueError("tuples that nest or unfold beyond any checkpoint's")
        return result


EMPTY = Tuple()
UNKNOWN = object()
TEXT = object()
"""Text or bytes that a call made."""

# Calls of these would allocate; torch.save writes none.
_NEVER = frozenset(["torch.Tensor", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"])
_FROM_STORAGE = frozenset(
    f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "qtensor")
)
_LATIN = frozenset(["latin1", "latin-1"])


def called(function: object, arguments: object) -> tuple[object, str | None]:
    """What a call gives, as far as it is followed, and what is wrong with it, or None.

    Args:
        function: what is called; what is no `Global` is not allowed anyway.
        arguments: a `Tuple` where they are known.
    """
    if not isinstance(function, Global):
        return UNKNOWN, "a call of something that is no function"
    name = function.name
    known = arguments if isinstance(arguments, Tuple) else None
    if name in _NEVER:
        return UNKNOWN, f"a call of {name}, which torch.save never writes"
    if name in _FROM_STORAGE:
        return _tensor(name, known)
    if name == "torch._tensor._rebuild_from_type_v2":
        if known is None or len(known) != 4:
            return UNKNOWN, "a tensor whose parts are not known"
        return called(known[0], known[2])
    if name in ("builtins.bytearray", "_codecs.encode"):
        return TEXT, None if _is_text(known) else f"a call of {name} with no text in Latin-1"
    if name == "torch.Size":
        first = known[0] if known else EMPTY
        return (first, None) if isinstance(first, Tuple) else (UNKNOWN, None)
    if name == "torch._utils._rebuild_device_tensor_from_cpu_tensor":
        plain = known and isinstance(known[0], Tensor) and not known[0].expanded
        return Tensor(), None if plain else "an expanded tensor that is to be copied"
    if name.startswith("torch._utils._rebuild_") or name == "torch.nn.parameter.Parameter":
        return (known[0] if known and isinstance(known[0], Tensor) else Tensor()), None
    return UNKNOWN, None


def _tensor(name: str, arguments: Tuple | None) -> tuple[object, str | None]:
    match arguments:
        case [Storage() as storage, int(offset), Tuple() as size, Tuple() as stride, *rest]:
            pass
        case _:
            return UNKNOWN, "a tensor whose sizes are not known"
    item = storage.item
    if name.endswith("_v3"):
        named = rest[2] if len(rest) > 2 else None
        dtype = getattr(torch, named.name[6:], None) if isinstance(named, Global) else None
        if not isinstance(dtype, torch.dtype):
            return UNKNOWN, "a tensor of unknown dtype"
        item = dtype.itemsize
    sizes = [n for n in size if type(n) is int]
    strides = [n for n in stride if type(n) is int]
    if not len(size) == len(sizes) == len(strides) == len(stride) <= _RANK:
        return UNKNOWN, "a tensor whose sizes and strides are no dimensions"
    if min(offset, *sizes, *strides, 0) < 0:
        return UNKNOWN, "a tensor with a negative size, stride or offset"
    if max(*sizes, *strides, offset, 0) >= _ELEMENTS or math.prod(sizes) >= _ELEMENTS:
        return UNKNOWN, "a tensor whose sizes overflow"
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and (last + 1) * item > storage.bytes:
        return UNKNOWN, f"a tensor of sizes {tuple(sizes)} reaches beyond its storage"
    return Tensor(math.prod(sizes) * item > storage.bytes), None


def _is_text(arguments: Tuple | None) -> bool:
    """Whether they are none, bytes, or a text and the encoding that picklers write.

    Others take time that grows with the square of the text (idna, punycode).
    """
    match arguments:
        case [] | [bytes()]:
            return True
        case [first, str(encoding)]:
            return encoding in _LATIN and (isinstance(first, str | LongText) or first is TEXT)
        case [first]:
            return isinstance(first, LongText) or first is TEXT
    return False
