"""A folder that torch.distributed.checkpoint wrote: of FSDP, torchtitan, Lightning's strategies.

Lightning's have `meta.pt` beside the parts, which is its checkpoint without weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from fuseport.exporter.checkpoint.content import Candidate, Content, show
from fuseport.exporter.checkpoint.files import lightning, state_dict
from fuseport.exporter.checkpoint.sharded import METADATA, Sharded, read
from fuseport.exporter.checkpoint.sniff import sniff
from fuseport.exporter.checkpoint.torch_file import read_torch
from fuseport.exporter.errors import CorruptInput

__all__ = ["SIGNS", "recognise"]

_META = "meta.pt"
SIGNS = (METADATA,)

_TRAINING = re.compile(r"optim(izer)?s?(_.*)?|(lr_)?schedulers?(_.*)?|rng(_.*)?|dataloader(_.*)?")
_Keys = tuple[str | int, ...]


def recognise(folder: Path) -> tuple[Content, list[Path]] | None:
    """The content and the files it was read from; None where the folder is of another layout.

    What optimizers and schedulers keep is not read.

    Raises:
        UnsafeInput, CorruptInput: as reading the files does; there are no weights.
    """
    if not (folder / METADATA).is_file():
        return None
    sharded = read(folder)
    groups = _groups(sharded)
    if not groups:
        raise CorruptInput(
            f"{show(folder / METADATA)}: no tensors in it but of training; give a checkpoint that"
            " holds weights"
        )
    candidates = tuple(_candidate(sharded, k, groups[k]) for k in sorted(groups, key=_rank))
    files = [folder / METADATA, *sharded.files]
    why = (METADATA, *(file.name for file in sharded.files[:1]))
    meta = _lightning(folder / _META, candidates[0])
    if meta is None:
        return Content("distributed", candidates, why=why), files
    return (
        Content("distributed", candidates, meta.config, notes=meta.notes, why=(*why, _META)),
        [*files, folder / _META],
    )


def _groups(sharded: Sharded) -> dict[_Keys, dict[str, str]]:
    """State dicts by the keys that lead to them: a value's own name → its name in the folder."""
    found: dict[_Keys, dict[str, str]] = {}
    for name, path in sharded.paths.items():
        *keys, last = path
        if isinstance(last, str) and not any(map(_is_of_training, keys)):
            found.setdefault(tuple(keys), {})[last] = name
    return {
        keys: values
        for keys, values in found.items()
        if any(name in sharded.tensors for name in values.values())
    }


def _is_of_training(key: str | int) -> bool:
    return isinstance(key, str) and _TRAINING.fullmatch(key) is not None


def _rank(keys: _Keys) -> int:
    usual = state_dict.USUAL
    return usual.index(keys[-1]) if keys and keys[-1] in usual else len(usual)


def _candidate(sharded: Sharded, keys: _Keys, values: Mapping[str, str]) -> Candidate:
    entries = {
        own: sharded.tensor(name) if name in sharded.tensors else None
        for own, name in values.items()
    }
    return Candidate(".".join(map(str, keys)) or "state dict", entries)


def _lightning(meta: Path, weights: Candidate) -> Content | None:
    """What Lightning says beside the weights; None where it is not there."""
    if not meta.is_file():
        return None
    loaded = read_torch(meta, sniff(meta))
    if not isinstance(loaded, Mapping):
        return None
    return lightning.recognise(meta, {**loaded, "state_dict": weights.entries})
