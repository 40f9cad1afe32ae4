"""Vision Mamba (Vim), VideoMamba and others: what DeiT's training script saves.

Source: `main.py` of github.com/hustvl/Vim. `model` and `model_ema` are two sets of weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint.content import Content, state_dicts
from fuseport.exporter.checkpoint.plain import settings

__all__ = ["SIGNS", "recognise"]

SIGNS = ("model", "optimizer", "lr_scheduler", "epoch", "args")


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The weights; `training` are the script's arguments.

    Raises:
        CorruptInput: the arguments nest without end.
    """
    candidates = state_dicts(loaded, ("model", "model_ema"))
    if not loaded.keys() >= set(SIGNS) or not candidates:
        return None
    return Content("vim", candidates, training=settings(path, "args", loaded["args"]), why=SIGNS)
