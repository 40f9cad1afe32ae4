"""`.safetensors`: an 8-byte length, a JSON header of that length, then the numbers.

The library reads the numbers. The header is checked here first, since of a key that occurs twice
the library takes the last, and its messages do not say what to do.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.checkpoint.folder import parsed
from fuseport.exporter.errors import CorruptInput

__all__ = ["read_safetensors"]

_HEADER_LIMIT = 100_000_000  # the format's own
_RANK = 64
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file by name, memory-mapped by the library: not read until used.

    Raises:
        CorruptInput: the file breaks the format anywhere.
    """
    _check(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptInput(
            f"{show(path)}: not readable as safetensors ({show(error)}); fetch it again"
        ) from error


def _check(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, size - 8):
            raise _corrupt(path, "header", f"it claims {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = parsed(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "header", f"no valid JSON ({show(error, 100)})") from error
    # It is an object: a file is taken for safetensors by the brace that begins it.
    header.pop("__metadata__", None)
    spans = sorted((*_span(path, name, entry), name) for name, entry in header.items())
    position = 0
    for start, end, name in spans:
        if start != position:
            what = "overlaps the one before it" if start < position else "leaves a hole before it"
            raise _corrupt(path, name, f"its data {what}")
        position = end
    if position != size - 8 - length:
        raise _corrupt(
            path, "data", f"the header describes {position} bytes, there are {size - 8 - length}"
        )


def _span(path: Path, name: str, entry: object) -> tuple[int, int]:
    """Start and end of a tensor's data, checked against its shape and dtype."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]}:
            pass
        case _:
            raise _corrupt(path, name, "an entry without dtype, shape and data_offsets")
    if len(shape) > _RANK:
        raise _corrupt(path, name, f"{len(shape)} dimensions")
    if dtype not in _BYTES:
        raise _corrupt(path, name, f"dtype {show(dtype, 20)}, which this reader does not know")
    if not _all_sizes([*shape, start, end]):
        raise _corrupt(path, name, "a size or offset that is no whole number from 0 to 2**63")
    if end - start != math.prod(shape) * _BYTES[dtype]:
        raise _corrupt(path, name, f"{dtype} {show(shape, 60)} does not fill {end - start} bytes")
    return start, end


def _all_sizes(values: Sequence[object]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _corrupt(path: Path, member: str, reason: str) -> CorruptInput:
    return CorruptInput(f"{show(path)}: {show(member)}: {reason}; fetch or save the file again")
