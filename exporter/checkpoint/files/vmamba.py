"""VMamba: what Swin's training script saves, with `model_ema` added.

Source: `classification/utils/utils_ema.py` of github.com/MzeroMiko/VMamba. `config` is a CfgNode of
yacs, which is read as a dictionary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint.content import Content, state_dicts
from fuseport.exporter.checkpoint.plain import settings

__all__ = ["SIGNS", "recognise"]

SIGNS = ("model", "optimizer", "lr_scheduler", "epoch", "max_accuracy", "config")


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The weights; `training` is the script's configuration (its `MODEL` describes the model).

    Raises:
        CorruptInput: the configuration nests without end.
    """
    candidates = state_dicts(loaded, ("model", "model_ema"))
    if not loaded.keys() >= set(SIGNS) or not candidates:
        return None
    training = settings(path, "config", loaded["config"])
    return Content("vmamba", candidates, training=training, why=SIGNS)
