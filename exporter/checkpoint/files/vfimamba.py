"""VFIMamba's `.pkl`: a state dict under data parallelism, with buffers that its loader drops.

Source: `convert` in `Trainer_finetune.py` of github.com/MCG-NJU/VFIMamba, which keeps names with
`module.` and none with `attn_mask` or `HW`: sizes that a network in use makes again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.checkpoint.content import Candidate, Content

__all__ = ["SIGNS", "recognise"]

SIGNS = ("module.feature_bone.*",)

_PREFIX = "module."
_BACKBONE = "module.feature_bone."
_DROPPED = ("attn_mask", "HW")


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """What its loader keeps; a note says what was dropped."""
    names = [name for name, value in loaded.items() if isinstance(name, str) and _tensor(value)]
    if len(names) != len(loaded) or not any(name.startswith(_BACKBONE) for name in names):
        return None
    kept = {
        name: value
        for name, value in loaded.items()
        if _PREFIX in name and not any(part in name for part in _DROPPED)
    }
    dropped = [name for name in names if name not in kept]
    notes: tuple[str, ...] = ()
    if dropped:
        notes = (f"left out, as its own loader does: {', '.join(dropped[:4])} ({len(dropped)})",)
    return Content("vfimamba", (Candidate("state dict", kept),), notes=notes, why=SIGNS)


def _tensor(value: object) -> bool:
    return isinstance(value, Tensor)
