"""The folder of state-spaces/mamba: config.json (of MambaConfig) and pytorch_model.bin."""

from pathlib import Path

from fuseport.exporter.checkpoint import shards
from fuseport.exporter.checkpoint.content import Candidate, Content
from fuseport.exporter.checkpoint.folder import read_json

__all__ = ["SIGNS", "recognise"]

_CONFIG = "config.json"
_WEIGHTS = ("pytorch_model.bin", "model.safetensors")
SIGNS = (_CONFIG, "|".join((*_WEIGHTS, *(f"{name}.index.json" for name in _WEIGHTS))))


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    Raises:
        UnsafeInput, CorruptInput: as reading the files does.
    """
    weights = shards.find(folder, _WEIGHTS)
    if weights is None or not (folder / _CONFIG).is_file():
        return None
    config = read_json(folder / _CONFIG)
    if not {"d_model", "n_layer"} <= config.keys():
        return None
    tensors, notes, files = shards.read_weights(weights)
    why = (f"{_CONFIG} with d_model and n_layer", weights.name)
    content = Content(
        "state_spaces", (Candidate(weights.name, tensors),), config, notes=notes, why=why
    )
    return content, [folder / _CONFIG, *files]
