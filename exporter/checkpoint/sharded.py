"""What torch.distributed.checkpoint wrote: tensors in parts, in files that many processes wrote.

A folder has a file for each process, with one `torch.save` of each part after another, and
`.metadata`, a pickle that says which parts a tensor has, and where. The pickle is read by an
unpickler of our own, in which classes are records that run nothing.
"""

import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.checkpoint import pickles
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.checkpoint.folder import inside
from fuseport.exporter.checkpoint.sniff import require_regular
from fuseport.exporter.checkpoint.torch_file import read_part
from fuseport.exporter.errors import CorruptInput, UnsafeInput

__all__ = ["METADATA", "Sharded", "read"]

METADATA = ".metadata"

# A part takes about 45: enough for 4,000 tensors in 50 parts each. A second for each million.
_OPERATIONS = 10_000_000
_LISTED = 20
_ELEMENTS = 2**60

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """Of a tensor: where in it, and the bytes of a file that have it."""

    offsets: Sizes
    sizes: Sizes
    file: Path
    begin: int
    length: int


@dataclass(frozen=True)
class _Whole:
    """A tensor."""

    dtype: torch.dtype
    sizes: Sizes
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class Sharded:
    """What the metadata of a folder say; tensors are read when they are asked for.

    Attributes:
        metadata: the file that says it.
        paths: of each value, by its name, the keys of nested dictionaries that lead to it.
        tensors: by name; values of other names are no tensors.
    """

    metadata: Path
    paths: Mapping[str, tuple[str | int, ...]]
    tensors: Mapping[str, _Whole]

    @cached_property
    def files(self) -> list[Path]:
        """The files with parts of tensors, in order of their names."""
        return sorted({part.file for whole in self.tensors.values() for part in whole.parts})

    def tensor(self, name: str) -> Tensor:
        """A tensor, of all its parts.

        Raises:
            CorruptInput: a part is damaged, or parts are not all of the tensor once.
        """
        whole = self.tensors[name]
        if len(whole.parts) == 1 and whole.parts[0].sizes == whole.sizes:
            return self._read(name, whole.parts[0], whole.dtype)
        result = torch.empty(whole.sizes, dtype=whole.dtype)
        times = torch.zeros(whole.sizes, dtype=torch.uint8)
        for part in whole.parts:
            box = tuple(
                slice(begin, begin + size)
                for begin, size in zip(part.offsets, part.sizes, strict=True)
            )
            result[box] = self._read(name, part, whole.dtype)
            times[box] += 1
        if not bool((times == 1).all()):
            raise self._wrong(name, "its parts are not all of it, each once")
        return result

    def _read(self, name: str, part: _Part, dtype: torch.dtype) -> Tensor:
        found = read_part(part.file, part.begin, part.length)
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (dtype, part.sizes):
            raise self._wrong(name, f"what {part.file.name} has is no {dtype} of {part.sizes}")
        if found.layout != torch.strided or found.device.type != "cpu":
            raise self._wrong(name, "it is no dense tensor of the CPU")
        return found.detach()

    def _wrong(self, name: str, reason: str) -> CorruptInput:
        return _corrupt(self.metadata, f"{show(name)}: {reason}")


def read(folder: Path) -> Sharded:
    """The metadata of a folder.

    Raises:
        UnsafeInput: they name anything but the package's own records and plain data, or a file
            outside the folder.
        CorruptInput: they are damaged, or of another form; a part is not in its file.
    """
    path = folder / METADATA
    require_regular(path)
    with path.open("rb") as file:
        found = pickles.scan(file, most=_OPERATIONS)
        strange = [name for name in found.names if _known(name) is None]
        if strange:
            raise UnsafeInput(
                f"{show(path)}: reading it would import {', '.join(map(show, strange[:_LISTED]))};"
                " nothing was run: save the checkpoint again by torch.distributed.checkpoint, or"
                " make one file of it where it was made: python -m"
                " torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"
            )
        if found.broken is not None:
            raise _corrupt(path, found.broken)
        file.seek(0)
        try:
            content = _Unpickler(file).load()
        except Exception as error:  # whatever hostile bytes make of it; it is not tried again
            raise _corrupt(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    return _Reading(path, content).sharded()


# --- the pickle ----------------------------------------------------------------------------------


class _Record:
    """Stands in for a class: keeps the state that it is given."""

    state: object = None

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field; None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Index(_Record):
    """Which value, and where in it a part begins: what places in files are looked up by."""

    def __hash__(self) -> int:
        return id(self)


class _Wholes(_Record):
    """A tensor's sizes and parts."""


class _Properties(_Record):
    """A tensor's dtype, and what it was like."""


def _tuple(*args: object) -> tuple[object, ...]:
    return tuple(args[0]) if args and isinstance(args[0], tuple) else ()


def _text(*args: object) -> str:
    return "/".join(str(arg) for arg in args if isinstance(arg, str))


_OF_METADATA = "torch.distributed.checkpoint.metadata."
_CLASSES: dict[str, Any] = {
    f"{_OF_METADATA}Metadata": _Record,
    f"{_OF_METADATA}StorageMeta": _Record,
    f"{_OF_METADATA}_MEM_FORMAT_ENCODING": _Record,
    f"{_OF_METADATA}ChunkStorageMetadata": _Record,
    f"{_OF_METADATA}TensorStorageMetadata": _Wholes,
    f"{_OF_METADATA}BytesStorageMetadata": _Record,
    f"{_OF_METADATA}TensorProperties": _Properties,
    f"{_OF_METADATA}MetadataIndex": _Index,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Record,
    "torch.Size": _tuple,
    "torch.serialization._get_layout": _text,
    **{
        f"{module}.{kind}Path": _text
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "PurePosix", "Windows", "PureWindows")
    },
}


def _known(name: str) -> Any:
    """What stands in for a name; None for one that is not allowed."""
    if name in _CLASSES:
        return _CLASSES[name]
    dtype = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return dtype if isinstance(dtype, torch.dtype) else None


class _Unpickler(pickle._Unpickler):  # in Python: no file can make its memo large
    def find_class(self, module: str, name: str) -> Any:
        found = _known(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return found


# --- what it says --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """Makes of records what they say, and holds it against the files."""

    path: Path
    content: object

    def sharded(self) -> Sharded:
        """Raises CorruptInput, UnsafeInput: as `read`."""
        content = self.content
        if not isinstance(content, _Record) or not isinstance(content.state, dict):
            raise _corrupt(self.path, "it is no metadata of a checkpoint")
        values, places = content.get("state_dict_metadata"), content.get("storage_data")
        paths = content.get("planner_data")
        if not isinstance(values, dict) or not isinstance(places, dict):
            raise _corrupt(self.path, "it does not say what there is, and where")
        by_index = {self._key(index): place for index, place in places.items()}
        tensors = {
            name: self._whole(name, value, by_index)
            for name, value in values.items()
            if isinstance(name, str) and isinstance(value, _Wholes)
        }
        self._hold([part for whole in tensors.values() for part in whole.parts])
        said = paths if isinstance(paths, dict) else {}
        return Sharded(
            self.path,
            {name: self._path(said.get(name), name) for name in values if isinstance(name, str)},
            tensors,
        )

    def _key(self, index: object) -> tuple[object, object]:
        if not isinstance(index, _Index):
            raise _corrupt(self.path, "a place of something that is no value")
        offset = index.get("offset")
        return index.get("fqn"), None if offset is None else self._sizes(offset)

    def _path(self, keys: object, name: str) -> tuple[str | int, ...]:
        known = keys if isinstance(keys, tuple) else ()
        found = tuple(key for key in known if isinstance(key, str | int))
        return found if found and len(found) == len(known) else (name,)

    def _sizes(self, value: object) -> Sizes:
        if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
            raise _corrupt(self.path, "sizes that are no whole numbers")
        if math.prod(value) > _ELEMENTS:
            raise _corrupt(self.path, f"a tensor of {value}")
        return value

    def _whole(self, name: str, value: _Wholes, places: Mapping[Any, object]) -> _Whole:
        properties, chunks = value.get("properties"), value.get("chunks")
        match properties:
            case _Properties(state=[torch.dtype() as dtype, *_]):
                pass
            case _:
                raise _corrupt(self.path, f"{show(name)}: it has no dtype")
        sizes = self._sizes(value.get("size"))
        if not isinstance(chunks, list) or not chunks:
            raise _corrupt(self.path, f"{show(name)}: it has no parts")
        return _Whole(dtype, sizes, tuple(self._parts(name, dtype, sizes, chunks, places)))

    def _parts(
        self,
        name: str,
        dtype: torch.dtype,
        whole: Sizes,
        chunks: list[Any],
        places: Mapping[Any, object],
    ) -> Iterator[_Part]:
        for chunk in chunks:
            if not isinstance(chunk, _Record):
                raise _corrupt(self.path, f"{show(name)}: a part that is none")
            offsets, sizes = self._sizes(chunk.get("offsets")), self._sizes(chunk.get("sizes"))
            within = len(offsets) == len(sizes) == len(whole) and all(
                begin + size <= of for begin, size, of in zip(offsets, sizes, whole, strict=True)
            )
            place = places.get((name, offsets))
            if not within or not isinstance(place, _Record):
                raise _corrupt(self.path, f"{show(name)}: a part outside of it, or of no file")
            if place.get("transform_descriptors"):
                raise _corrupt(
                    self.path,
                    f"{show(name)}: its file is transformed, by"
                    f" {show(place.get('transform_descriptors'))}",
                )
            begin, length = place.get("offset"), place.get("length")
            if type(begin) is not int or type(length) is not int or begin < 0:
                raise _corrupt(self.path, f"{show(name)}: a part at no place of a file")
            if length < math.prod(sizes) * dtype.itemsize:
                raise _corrupt(self.path, f"{show(name)}: a part of {length} bytes, too few for it")
            file = inside(self.path.parent, self.path, str(place.get("relative_path")))
            yield _Part(offsets, sizes, file, begin, length)

    def _hold(self, parts: list[_Part]) -> None:
        """Each part is in its file, and no two are the same bytes."""
        ends: dict[Path, int] = {}
        for part in sorted(parts, key=lambda part: (str(part.file), part.begin)):
            if part.begin < ends.get(part.file, 0):
                raise _corrupt(self.path, f"two parts are at byte {part.begin} of {part.file.name}")
            ends[part.file] = part.begin + part.length
        for file, end in ends.items():
            require_regular(file)
            if end > file.stat().st_size:
                raise CorruptInput(f"{show(file)}: it ends before its parts do; fetch it again")


def _corrupt(path: Path, reason: str) -> CorruptInput:
    return CorruptInput(f"{show(path)}: {show(reason)}; fetch or save the checkpoint again")
