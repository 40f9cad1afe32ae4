"""Mistral's folders, of which Codestral Mamba is one: params.json and consolidated.safetensors.

Source: github.com/mistralai/mistral-inference, whose `MambaArgs` are read from params.json (`dim`,
`n_layers`, `vocab_size`, `n_groups`, …), and whose module keeps mamba_ssm's language model, of
Mamba-2 layers, under `model.`. What MambaArgs do not say is mamba_ssm's default.
"""

from pathlib import Path

from fuseport.exporter.checkpoint import shards
from fuseport.exporter.checkpoint.content import Candidate, Content, show
from fuseport.exporter.checkpoint.folder import read_json
from fuseport.exporter.errors import CorruptInput

__all__ = ["SIGNS", "recognise"]

_PARAMS = "params.json"
_WEIGHTS = ("consolidated.safetensors", "consolidated.00.pth", "model.safetensors")
SIGNS = (_PARAMS, "|".join((*_WEIGHTS, *(f"{name}.index.json" for name in _WEIGHTS))))


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    Raises:
        UnsafeInput, CorruptInput: as reading the files does; params.json without sizes.
    """
    weights = shards.find(folder, _WEIGHTS)
    if weights is None or not (folder / _PARAMS).is_file():
        return None
    params = read_json(folder / _PARAMS)
    absent = [name for name in ("dim", "n_layers", "vocab_size") if name not in params]
    if absent:
        raise CorruptInput(
            f"{show(folder / _PARAMS)}: {', '.join(absent)}: absent, which Mistral's models have;"
            " fetch the file again"
        )
    tensors, notes, files = shards.read_weights(weights)
    why = (f"{_PARAMS} with dim and n_layers", weights.name)
    content = Content("mistral", (Candidate(weights.name, tensors),), params, notes=notes, why=why)
    return content, [folder / _PARAMS, *files]
