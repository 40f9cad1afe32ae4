"""A folder of an adapter that PEFT saved: adapter_config.json, and the weights that are added."""

from pathlib import Path

from fuseport.exporter.checkpoint import shards
from fuseport.exporter.checkpoint.content import Candidate, Content
from fuseport.exporter.checkpoint.folder import read_json

__all__ = ["SIGNS", "recognise"]

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # PEFT's own order of preference
SIGNS = (_CONFIG, "|".join(_WEIGHTS))


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    Raises:
        UnsafeInput: the weights file would run code.
        CorruptInput: a file is damaged.
    """
    weights = shards.find(folder, _WEIGHTS)
    if weights is None or not (folder / _CONFIG).is_file():
        return None
    config = read_json(folder / _CONFIG)
    tensors, notes, files = shards.read_weights(weights)
    content = Content(
        "peft",
        (Candidate(weights.name, tensors),),
        config,
        notes=notes,
        why=(_CONFIG, weights.name),
    )
    return content, [folder / _CONFIG, *files]
