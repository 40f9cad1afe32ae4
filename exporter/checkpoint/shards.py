"""Weights of a folder: in one file, or in shards that an index lists (`<name>.index.json`)."""

import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fuseport.exporter.checkpoint.content import only_tensors, show
from fuseport.exporter.checkpoint.folder import inside, read_json
from fuseport.exporter.checkpoint.safetensors_file import read_safetensors
from fuseport.exporter.checkpoint.sniff import sniff
from fuseport.exporter.checkpoint.torch_file import read_torch
from fuseport.exporter.errors import CorruptInput

__all__ = ["find", "read_weights"]

_Read = tuple[dict[str, Tensor], tuple[str, ...], list[Path]]


def find(folder: Path, names: Sequence[str]) -> Path | None:
    """The file that weights are to be read from: the first of `names`, else the first index."""
    for name in (*names, *(f"{name}.index.json" for name in names)):
        if (folder / name).is_file():
            return folder / name
    return None


def read_weights(file: Path) -> _Read:
    """The tensors of a file of weights, or of all shards of an index; notes; the files read.

    Raises:
        UnsafeInput: the index names a file outside its folder, or a file would run code.
        CorruptInput: a file is damaged, a shard is missing, lies there unlisted, has a tensor that
            another has too, or has not what the index says.
    """
    if file.name.endswith(".index.json"):
        return _shards(file)
    tensors, notes = _read(file)
    return tensors, notes, [file]


def _read(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    container = sniff(path)
    if container == "safetensors":
        return only_tensors(path, "safetensors", read_safetensors(path))
    loaded = read_torch(path, container)
    if not isinstance(loaded, dict):
        raise CorruptInput(f"{show(path)}: no state dict; fetch the file again")
    return only_tensors(path, "state dict", loaded)


def _shards(index: Path) -> _Read:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInput(f"{show(index)}: weight_map: absent or empty; fetch the file again")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptInput(f"{show(index)}: weight_map: not all names of files; fetch it again")
    # All names are judged before any file is opened.
    names = dict.fromkeys(weight_map.values())
    files = {name: inside(index.parent, index, name) for name in names}
    _no_strangers(index, set(files))
    tensors: dict[str, Tensor] = {}
    notes: tuple[str, ...] = ()
    for name, file in files.items():
        shard, more = _read(file)
        for key in shard:
            if key in tensors:
                raise _wrong(file, key, "another shard has it too")
            if key not in weight_map:
                raise _wrong(file, key, f"{index.name} does not list it")
            if weight_map[key] != name:
                raise _wrong(file, key, f"{index.name} says that it is in {weight_map[key]}")
        tensors |= shard
        notes += more
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise _wrong(index, absent[0], f"no shard has it, one of {len(absent)} such")
    return tensors, notes, [index, *files.values()]


def _no_strangers(index: Path, listed: set[str]) -> None:
    """A shard beside the listed ones, from another save or of another number of shards."""
    stem, _, suffix = index.name.removesuffix(".index.json").rpartition(".")
    pattern = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{re.escape(suffix)}")
    found = {file.name for file in index.parent.iterdir() if pattern.fullmatch(file.name)}
    strangers = sorted(found - listed)
    if strangers:
        raise CorruptInput(
            f"{show(index)}: {show(strangers[0])}: a shard that the index does not list, one of"
            f" {len(strangers)}; take it out, or fetch the index that belongs to it"
        )


def _wrong(file: Path, key: str, reason: str) -> CorruptInput:
    return CorruptInput(f"{show(file)}: {show(key)}: {show(reason)}; fetch the folder again")
