"""A Hugging Face model folder: config.json, and the weights in one file or in indexed shards."""

from pathlib import Path

from fuseport.exporter.checkpoint import shards
from fuseport.exporter.checkpoint.content import Candidate, Content, show
from fuseport.exporter.checkpoint.folder import read_json
from fuseport.exporter.errors import UnsafeInput

__all__ = ["SIGNS", "recognise"]

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # transformers' own order of preference
SIGNS = (_CONFIG, "|".join((*_WEIGHTS, *(f"{name}.index.json" for name in _WEIGHTS))))


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    Raises:
        UnsafeInput: the config names code of its own (`auto_map`), the index a file outside the
            folder, or a weights file would run code.
        CorruptInput: a file is damaged, or the weights do not agree with the index.
    """
    weights = shards.find(folder, _WEIGHTS)
    if weights is None or not (folder / _CONFIG).is_file():
        return None
    config = read_json(folder / _CONFIG)
    if not ("model_type" in config or "architectures" in config):
        return None
    if config.get("auto_map"):
        raise UnsafeInput(
            f"{show(folder / _CONFIG)}: auto_map: the model's code came with its weights and"
            " would run here; give a checkpoint of a model that transformers itself has"
        )
    tensors, notes, files = shards.read_weights(weights)
    why = (f"{_CONFIG} with model_type or architectures", weights.name)
    content = Content(
        "huggingface", (Candidate(weights.name, tensors),), config, notes=notes, why=why
    )
    return content, [folder / _CONFIG, *files]
