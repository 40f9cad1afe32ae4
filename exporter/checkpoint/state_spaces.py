"""The folder of state-spaces/mamba: config.json (of MambaConfig) and pytorch_model.bin."""

from pathlib import Path

from fuseport.exporter.checkpoint.content import Content, only_tensors, show
from fuseport.exporter.checkpoint.folder import read_json
from fuseport.exporter.checkpoint.sniff import sniff
from fuseport.exporter.checkpoint.torch_file import read_torch
from fuseport.exporter.errors import CorruptInput

__all__ = ["CONFIG", "WEIGHTS", "recognise"]

CONFIG, WEIGHTS = "config.json", "pytorch_model.bin"


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    Raises:
        UnsafeInput, CorruptInput: as reading the files does.
    """
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        return None
    config = read_json(folder / CONFIG)
    if not {"d_model", "n_layer"} <= config.keys():
        return None
    weights = folder / WEIGHTS
    container = sniff(weights)
    loaded = None if container == "safetensors" else read_torch(weights, container)
    if not isinstance(loaded, dict):
        raise CorruptInput(f"{show(weights)}: no state dict; fetch the file again")
    tensors, notes = only_tensors(weights, "state dict", loaded)
    return Content("state_spaces", tensors, config, notes), [folder / CONFIG, weights]
