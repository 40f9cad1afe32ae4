"""MambaVision's `.pth.tar` and others: what timm's training script saves.

Source: `timm.utils.CheckpointSaver`. `state_dict` and `state_dict_ema` are two sets of weights;
`arch` is the model's name in timm's registry.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint.content import Content, state_dicts
from fuseport.exporter.checkpoint.plain import settings

__all__ = ["SIGNS", "recognise"]

SIGNS = ("state_dict", "arch", "epoch", "version")


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The weights; `training` are the script's arguments and `arch`.

    Raises:
        CorruptInput: the arguments nest without end.
    """
    candidates = state_dicts(loaded, ("state_dict", "state_dict_ema"))
    if not loaded.keys() >= set(SIGNS) or not candidates:
        return None
    kept = {"arch": loaded["arch"]}
    training = settings(path, "args", loaded.get("args")) | settings(path, "arch", kept)
    return Content("timm", candidates, training=training, why=SIGNS)
