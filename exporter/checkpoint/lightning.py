"""Lightning `.ckpt`: a `state_dict` under attribute prefixes, hyperparameters, training state."""

from pathlib import Path

from fuseport.exporter.checkpoint.content import Content, only_tensors, show
from fuseport.exporter.checkpoint.plain import TooLargeError, plain
from fuseport.exporter.errors import CorruptInput

__all__ = ["recognise"]

_VERSION = "pytorch-lightning_version"
_HYPER = "hyper_parameters"


def recognise(path: Path, loaded: object) -> Content | None:
    """The model's weights; `config` are the hyperparameters, as data.

    Raises:
        CorruptInput: no tensors in `state_dict`, or hyperparameters that nest without end.
    """
    if not isinstance(loaded, dict) or _VERSION not in loaded:
        return None
    weights = loaded.get("state_dict")
    if not isinstance(weights, dict):
        return None
    tensors, notes = only_tensors(path, "state_dict", weights)
    try:
        hyper = plain(loaded.get(_HYPER) or {})
    except TooLargeError as error:
        raise CorruptInput(
            f"{show(path)}: {_HYPER}: {error}; save the checkpoint with plain hyperparameters"
        ) from error
    config = hyper if isinstance(hyper, dict) else {_HYPER: hyper}
    version = loaded[_VERSION]
    if isinstance(version, str):
        notes += (f"written by Lightning {show(version, 20)}",)
    callbacks = loaded.get("callbacks")
    for name in callbacks if isinstance(callbacks, dict) else ():
        if isinstance(name, str) and ("ema" in name.lower() or "averag" in name.lower()):
            notes += (f"callback {show(name, 60)} may hold averaged weights; they are not used",)
    return Content("lightning", tensors, config, notes)
