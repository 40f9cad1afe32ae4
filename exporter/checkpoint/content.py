"""What every layout gives back, and the checks on tensors that all layouts share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.errors import CorruptInput

__all__ = ["Content", "only_tensors", "show"]

# Weights that share a storage (a tied head) make the tensors add up to more than their file. A
# stride of 0 can claim terabytes from one number: allow the first, refuse the second.
_SHARING = 4
_SLACK = 64 * 2**20


@dataclass(frozen=True)
class Content:
    """What one layout found in a file or folder.

    Attributes:
        layout: the layout's name.
        tensors: by the names the file gives them; dense, on the CPU, without gradient. They may lie
            in a private memory map of the file.
        config: plain data: dict, list, str, int, float, bool, None.
        notes: what a user should know, a sentence each.
    """

    layout: str
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def only_tensors(
    path: Path, member: str, mapping: Mapping[Any, Any]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of a state dict by name, and a note on entries that are none.

    Raises:
        CorruptInput: no tensors at all; a tensor that is sparse, quantised, without data, or of a
            subclass; sizes that claim far more numbers than the file holds.
    """
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    for key, value in mapping.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            tensors[key] = _dense(path, key, value)
        else:
            others.append(show(key) if isinstance(key, str) else f"<{type(key).__name__}>")
    if not tensors:
        raise CorruptInput(
            f"{show(path)}: {member}: no tensors in it; give a checkpoint that holds weights"
        )
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    held = path.stat().st_size
    if claimed > _SHARING * held + _SLACK:
        raise CorruptInput(
            f"{show(path)}: {member}: its tensors claim {claimed} bytes, the file has {held};"
            " save the weights again without expanded tensors"
        )
    if others:
        some = ", ".join(others[:5])
        return tensors, (f"{member}: entries that are no tensors are left out: {some}",)
    return tensors, ()


def show(text: object, limit: int = 200) -> str:
    """`text` on one line without control characters: names in a file are the file's, not ours."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _dense(path: Path, key: str, tensor: Tensor) -> Tensor:
    kind = None
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = f"a {type(tensor).__name__}"
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
