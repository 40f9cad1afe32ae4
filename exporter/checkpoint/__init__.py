"""A path → weights and what was saved with them, without running anything that came with them.

One layout is one module of `files` or `folders`, found there by `registry`.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.checkpoint import registry
from fuseport.exporter.checkpoint.choice import choose
from fuseport.exporter.checkpoint.content import Candidate, Content, show
from fuseport.exporter.checkpoint.safetensors_file import read_safetensors
from fuseport.exporter.checkpoint.sniff import sniff
from fuseport.exporter.checkpoint.torch_file import read_torch
from fuseport.exporter.errors import CorruptInput, StorageError, UsageError

__all__ = ["Checkpoint", "load", "read"]


@dataclass(frozen=True)
class Checkpoint:
    """Weights and metadata, as the file has them.

    Attributes:
        path: what was given.
        layout: `safetensors`, or the name of a module of `files` or `folders`.
        tensors: by the names the file gives them (prefixes are `models.weights`' concern), on the
            CPU, without gradient. They may lie in a private memory map of the file: copy before
            writing.
        config: config.json or Lightning's hyperparameters, as plain data; {} if there are none.
        sha256: of the file. Of a folder: of the text that `sha256sum` prints for the files that
            were read (config, index, weights; sorted by name): a line `<sha256>  <name>` each.
        notes: what a user should know, a sentence each.
        weights: which of the file's weights they are, as `--weights` takes it.
        training: settings of the training run, as plain data; {} if there are none.
    """

    path: Path
    layout: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    sha256: str
    notes: tuple[str, ...] = ()
    weights: str = ""
    training: dict[str, Any] = field(default_factory=dict)


def load(path: Path, weights: str | None = None) -> Checkpoint:
    """Read a checkpoint file or folder; its layout is found from its content.

    Args:
        path: of the file or folder.
        weights: which of several, `model_ema` for example, or the prefix of one model of several
            in a state dict; None where there is one.

    Raises:
        UsageError: nothing is at `path`, or something that is neither file nor folder; there are
            several sets of weights of equal shapes, or none of that name.
        UnsafeInput: reading it would run code that came with it.
        CorruptInput: it is damaged, or no layout that is known here.
        StorageError: the file system refuses to read it.
    """
    path = Path(path)
    content, files = read(path)
    try:
        held = sum(file.stat().st_size for file in files)
        name, tensors, notes = choose(path, held, content.candidates, weights)
        sha256 = _folder_hash(files) if path.is_dir() else _file_hash(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    notes = (*content.notes, *notes)
    return Checkpoint(
        path, content.layout, tensors, content.config, sha256, notes, name, content.training
    )


def read(path: Path) -> tuple[Content, list[Path]]:
    """All that a checkpoint holds, no weights chosen yet, and the files it was read from.

    Raises:
        UsageError, UnsafeInput, CorruptInput, StorageError: as `load`.
    """
    try:
        if not path.exists():
            raise UsageError(f"{show(path)}: there is no such file or folder; check the path")
        return _read_folder(path) if path.is_dir() else (_read_file(path), [path])
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_file(path: Path) -> Content:
    container = sniff(path)
    if container == "safetensors":
        entries = read_safetensors(path)
        why = ("a safetensors header",)
        return Content("safetensors", (Candidate("safetensors", entries),), why=why)
    loaded = read_torch(path, container)
    if not isinstance(loaded, Mapping):
        raise CorruptInput(
            f"{show(path)}: a {type(loaded).__name__} and no state dict is what torch.save wrote;"
            " save model.state_dict()"
        )
    for layout in registry.FILES.values():
        content = layout.recognise(path, loaded)
        if content is not None:
            return content
    keys = [key for key in loaded if isinstance(key, str)]
    raise CorruptInput(
        f"{show(path)}: there is no state dict in what torch.save wrote"
        f" ({registry.nearest(registry.FILES, keys)}); save model.state_dict()"
    )


def _read_folder(path: Path) -> tuple[Content, list[Path]]:
    for layout in registry.FOLDERS.values():
        found = layout.recognise(path)
        if found is not None:
            return found
    names = [file.name for file in path.iterdir()]
    for sign, advice in _OTHER_FOLDERS.items():
        if told := sorted(name for name in names if re.fullmatch(sign, name)):
            raise CorruptInput(f"{show(path)}: no checkpoint folder: {show(told[0])} is {advice}")
    if {"manifest.json", "weights.safetensors"} <= set(names):
        raise CorruptInput(f"{show(path)}: a bundle, of an export: fuseport verify {show(path)}")
    files = [show(path / name) for name in sorted(names) if name.endswith(_FILES)]
    alone = f", as {', '.join(files[:3])}" if files else ""
    raise CorruptInput(
        f"{show(path)}: no checkpoint folder ({registry.nearest(registry.FOLDERS, names)});"
        f" give such a folder, or the checkpoint file itself{alone}"
    )


_FILES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")

# What training writes that is no state dict yet, by a file that tells, and how to make one of it.
_OTHER_FOLDERS = {
    r".*\.distcp": "a part of a checkpoint of torch.distributed.checkpoint (FSDP and others),"
    " whose .metadata is not there; fetch it too",
    r"latest|zero_to_fp32\.py|(.*_optim|mp_rank_\d+_model)_states\.pt": "DeepSpeed's; make one "
    "file of its parts by the script in it, python zero_to_fp32.py FOLDER FILE, or, without "
    "ZeRO-3, give mp_rank_00_model_states.pt",
    r"adapter_config\.json|adapter_model\.\w+": "an adapter of peft, without the model that it is "
    "of; save both as one: model.merge_and_unload().save_pretrained(FOLDER)",
}


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{show(path)}: it cannot be read ({show(error)}); check its permissions and the disk"
    )


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_hash(files: list[Path]) -> str:
    lines = [f"{_file_hash(file)}  {file.name}\n" for file in sorted(files, key=lambda f: f.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
