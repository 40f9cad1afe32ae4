"""What every layout gives back, and the checks on tensors that all layouts share."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.errors import CorruptInput

__all__ = ["Candidate", "Content", "is_state_dict", "only_tensors", "show", "state_dicts"]

# Weights that share a storage (a tied head) make the tensors add up to more than their file. A
# stride of 0 can claim terabytes from one number: allow the first, refuse the second.
_SHARING = 4
_SLACK = 64 * 2**20


@dataclass(frozen=True)
class Candidate:
    """One set of weights in a checkpoint; training scripts save two, the second averaged.

    Attributes:
        name: where it is in the file: a key, or keys with dots between; what `--weights` takes.
        entries: by the names the file gives them; entries that are no tensors may be among them.
        what: what it is where the name does not say it, `the average that training made`.
    """

    name: str
    entries: Mapping[Any, Any]
    what: str = ""


@dataclass(frozen=True)
class Content:
    """What one layout found in a file or folder.

    Attributes:
        layout: the layout's name.
        candidates: sets of weights to choose from, the usual one first; at least one.
        config: what the model is made from, as plain data: dict, list, str, int, float, bool, None.
        training: settings of the training run, as plain data; the model is not made from them.
        notes: what a user should know, a sentence each.
        why: the keys or files that told the layout.
    """

    layout: str
    candidates: tuple[Candidate, ...]
    config: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


def state_dicts(
    loaded: Mapping[Any, Any], first: Collection[str] = (), prefix: str = ""
) -> tuple[Candidate, ...]:
    """The entries of `loaded` that are state dicts, those of the names `first` before the others.

    A state dict maps names to tensors, some of them at least: modules may add entries of their own
    (`_extra_state`). An optimizer's maps numbers.
    """
    # Each is looked through once, under however many keys it is.
    maps = {id(value): value for value in loaded.values() if isinstance(value, Mapping)}
    fit = {key for key, value in maps.items() if is_state_dict(value)}
    found = {
        key: Candidate(f"{prefix}{key}", value)
        for key, value in loaded.items()
        if isinstance(key, str) and id(value) in fit
    }
    order = [key for key in first if key in found]
    return tuple(found[key] for key in dict.fromkeys([*order, *found]))


def is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Whether something maps names to tensors."""
    return any(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def only_tensors(
    path: Path, member: str, mapping: Mapping[Any, Any], held: int | None = None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of a state dict by name, and a note on entries that are none.

    Args:
        path: the file or folder, for errors.
        member: where in it the mapping is.
        mapping: names and values.
        held: bytes of the files that it comes from; None for the size of `path`.

    Raises:
        CorruptInput: no tensors at all; a tensor that is sparse, nested, quantised, without data,
            or of a subclass; a name that is no Unicode; sizes that claim far more numbers than the
            file holds.
    """
    tensors: dict[str, Tensor] = {}
    others: list[object] = []
    for key, value in mapping.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            tensors[key] = _dense(path, key, value)
        else:
            others.append(key)
    if not tensors:
        raise CorruptInput(
            f"{show(path)}: {member}: no tensors in it; give a checkpoint that holds weights"
        )
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    held = path.stat().st_size if held is None else held
    if claimed > _SHARING * held + _SLACK:
        raise CorruptInput(
            f"{show(path)}: {member}: its tensors claim {claimed} bytes, the file has {held};"
            " save the weights again without expanded tensors"
        )
    if others:
        some = ", ".join(
            show(key) if isinstance(key, str) else f"<{type(key).__name__}>" for key in others[:5]
        )
        return tensors, (f"{member}: entries that are no tensors are left out: {some}",)
    return tensors, ()


def show(text: object, limit: int = 200) -> str:
    """`text` on one line without control characters: names in a file are the file's, not ours."""
    begin = str(text)[: limit + 1]  # what is in a file may be long
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in begin)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _dense(path: Path, key: str, tensor: Tensor) -> Tensor:
    kind = None
    if not _is_unicode(key):
        raise CorruptInput(
            f"{show(path)}: {show(key)}: a name with half a character of UTF-16, which no file can"
            " have as a name; rename it and save the weights again"
        )
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = f"a {type(tensor).__name__}"
    elif tensor.is_nested:
        kind = "nested"
    elif tensor.layout != torch.strided:
        kind = f"of layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = "quantised"
    elif tensor.device.type != "cpu":
        kind = f"on the {tensor.device.type} device, without data"
    if kind is not None:
        raise CorruptInput(
            f"{show(path)}: {show(key)}: it is {kind}; only dense tensors are read: convert it and"
            " save the weights again"
        )
    return tensor.detach()


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
