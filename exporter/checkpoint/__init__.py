"""A path → weights and what was saved with them, without running anything that came with them.

One layout is one file: `recognise` there gives a `Content`, or None where the layout is another.
Add a layout to the tuple it belongs to below.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.checkpoint import huggingface, lightning, state_dict, state_spaces
from fuseport.exporter.checkpoint.content import Content, show
from fuseport.exporter.checkpoint.safetensors_file import read_safetensors
from fuseport.exporter.checkpoint.sniff import sniff
from fuseport.exporter.checkpoint.torch_file import read_torch
from fuseport.exporter.errors import CorruptInput, StorageError, UsageError

__all__ = ["Checkpoint", "load"]

_OF_TORCH_FILES: Sequence[Callable[[Path, object], Content | None]] = (
    lightning.recognise,
    state_dict.recognise,
)
_OF_FOLDERS: Sequence[Callable[[Path], tuple[Content, list[Path]] | None]] = (
    huggingface.recognise,
    state_spaces.recognise,
)


@dataclass(frozen=True)
class Checkpoint:
    """Weights and metadata, as the file has them.

    Attributes:
        path: what was given.
        layout: `lightning`, `state_dict`, `safetensors`, `state_spaces` or `huggingface`.
        tensors: by the names the file gives them (prefixes are `models.weights`' concern), on the
            CPU, without gradient. They may lie in a private memory map of the file: copy before
            writing.
        config: config.json or Lightning's hyperparameters, as plain data; {} if there are none.
        sha256: of the file. Of a folder: of the text that `sha256sum` prints for the files that
            were read (config, index, weights; sorted by name): a line `<sha256>  <name>` each.
        notes: what a user should know, a sentence each.
    """

    path: Path
    layout: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    sha256: str
    notes: tuple[str, ...] = ()


def load(path: Path) -> Checkpoint:
    """Read a checkpoint file or folder; its layout is found from its content.

    Raises:
        UsageError: nothing is at `path`, or something that is neither file nor folder.
        UnsafeInput: reading it would run code that came with it.
        CorruptInput: it is damaged, or no layout that is known here.
        StorageError: the file system refuses to read it.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise UsageError(f"{show(path)}: there is no such file or folder; check the path")
        content, files = _read_folder(path) if path.is_dir() else (_read_file(path), [path])
        sha256 = _folder_hash(files) if path.is_dir() else _file_hash(path)
    except OSError as error:
        raise StorageError(
            f"{show(path)}: it cannot be read ({show(error)}); check its permissions and the disk"
        ) from error
    return Checkpoint(path, content.layout, content.tensors, content.config, sha256, content.notes)


def _read_file(path: Path) -> Content:
    container = sniff(path)
    if container == "safetensors":
        return read_safetensors(path)
    loaded = read_torch(path, container)
    for recognise in _OF_TORCH_FILES:
        content = recognise(path, loaded)
        if content is not None:
            return content
    raise CorruptInput(
        f"{show(path)}: there is no state dict in what torch.save wrote; save model.state_dict()"
    )


def _read_folder(path: Path) -> tuple[Content, list[Path]]:
    for recognise in _OF_FOLDERS:
        found = recognise(path)
        if found is not None:
            return found
    raise CorruptInput(
        f"{show(path)}: no checkpoint folder (config.json with model.safetensors or"
        " pytorch_model.bin); give such a folder, or the checkpoint file itself"
    )


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_hash(files: list[Path]) -> str:
    lines = [f"{_file_hash(file)}  {file.name}\n" for file in sorted(files, key=lambda f: f.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
