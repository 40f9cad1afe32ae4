"""A bare state dict as torch.save writes it, or one or more under the keys that scripts use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint.content import Candidate, Content, is_state_dict, state_dicts

__all__ = ["SIGNS", "recognise"]

SIGNS: tuple[str, ...] = ()  # what no other layout recognises

# In this order: where a file has `state_dict` and `model`, `model` may be an architecture's name.
_USUAL = ("state_dict", "model", "model_state_dict")


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The weights: of the file itself, or every state dict one level below."""
    candidates = state_dicts(loaded, _USUAL)
    if candidates:
        why = tuple(f"a state dict under {candidate.name}" for candidate in candidates)
        return Content("state_dict", candidates, why=why)
    if not is_state_dict(loaded):
        return None
    return Content("state_dict", (Candidate("state dict", loaded),), why=("names of tensors",))
