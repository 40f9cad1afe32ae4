"""A Hugging Face model folder: config.json, and the weights in one file or in indexed shards."""

from pathlib import Path

from torch import Tensor

from fuseport.exporter.checkpoint.content import Content, only_tensors, show
from fuseport.exporter.checkpoint.folder import inside, read_json
from fuseport.exporter.checkpoint.safetensors_file import read_safetensors
from fuseport.exporter.checkpoint.sniff import sniff
from fuseport.exporter.checkpoint.torch_file import read_torch
from fuseport.exporter.errors import CorruptInput, UnsafeInput

__all__ = ["recognise"]

CONFIG = "config.json"
_SINGLE = ("model.safetensors", "pytorch_model.bin")  # transformers' own order of preference
_INDEXES = tuple(f"{name}.index.json" for name in _SINGLE)


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    Raises:
        UnsafeInput: the config names code of its own (`auto_map`), the index a file outside the
            folder, or a weights file would run code.
        CorruptInput: a file is damaged, or the weights do not agree with the index.
    """
    if not (folder / CONFIG).is_file():
        return None
    config = read_json(folder / CONFIG)
    if not ("model_type" in config or "architectures" in config):
        return None
    if config.get("auto_map"):
        raise UnsafeInput(
            f"{show(folder / CONFIG)}: auto_map: the model's code came with its weights and"
            " would run here; give a checkpoint of a model that transformers itself has"
        )
    for name in _SINGLE:
        if (folder / name).is_file():
            tensors, notes = _read(folder / name)
            return Content("huggingface", tensors, config, notes), [folder / CONFIG, folder / name]
    for name in _INDEXES:
        if (folder / name).is_file():
            tensors, notes, files = _read_shards(folder, folder / name)
            content = Content("huggingface", tensors, config, notes)
            return content, [folder / CONFIG, folder / name, *files]
    raise CorruptInput(
        f"{show(folder)}: there is a config.json, but none of {', '.join((*_SINGLE, *_INDEXES))};"
        " fetch the weights too"
    )


def _read(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    container = sniff(path)
    if container == "safetensors":
        content = read_safetensors(path)
        return content.tensors, content.notes
    loaded = read_torch(path, container)
    if not isinstance(loaded, dict):
        raise CorruptInput(f"{show(path)}: no state dict; fetch the file again")
    return only_tensors(path, "state dict", loaded)


def _read_shards(
    folder: Path, index: Path
) -> tuple[dict[str, Tensor], tuple[str, ...], list[Path]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInput(f"{show(index)}: weight_map: absent or empty; fetch the file again")
    # All names are judged before any file is opened.
    files = {name: inside(folder, index, name) for name in dict.fromkeys(weight_map.values())}
    tensors: dict[str, Tensor] = {}
    notes: tuple[str, ...] = ()
    for file in files.values():
        shard, more = _read(file)
        twice = shard.keys() & tensors.keys()
        if twice:
            raise CorruptInput(
                f"{show(file)}: {show(min(twice))}: another shard has it too; fetch the folder"
                " again"
            )
        tensors |= shard
        notes += more
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise CorruptInput(
            f"{show(index)}: {show(absent[0])}: no shard has it, one of {len(absent)} such;"
            " fetch the folder again"
        )
    return tensors, notes, list(files.values())
