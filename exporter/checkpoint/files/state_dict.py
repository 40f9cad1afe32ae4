"""A bare state dict as torch.save writes it, or one or more under the keys that scripts use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint.allowed import Boxed, Namespace
from fuseport.exporter.checkpoint.content import Candidate, Content, is_state_dict, state_dicts
from fuseport.exporter.checkpoint.plain import settings

__all__ = ["SIGNS", "USUAL", "recognise"]

SIGNS: tuple[str, ...] = ()  # what no other layout recognises

USUAL = ("state_dict", "model", "model_state_dict")
"""Keys of weights, in this order: beside a `state_dict`, `model` may be an architecture's name."""

# Where scripts put what the model was made of; of several, the first. Not `args`: those are of the
# script, of other things as well, and so of the training.
_SETTINGS = (
    "hyper_parameters", "hparams", "model_args", "model_kwargs", "model_config", "config", "cfg"
)  # fmt: skip
_MAPPINGS = (Mapping, Namespace, Boxed)


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The weights: of the file itself, or every state dict one level below.

    `config` are the settings beside them that the model was made of, `training` the script's, as
    data.

    Raises:
        CorruptInput: these nest without end.
    """
    candidates = state_dicts(loaded, USUAL)
    if candidates:
        why = tuple(f"a state dict under {candidate.name}" for candidate in candidates)
        named = next((key for key in _SETTINGS if isinstance(loaded.get(key), _MAPPINGS)), None)
        config = {} if named is None else settings(path, named, loaded[named])
        given = loaded.get("args")
        training = settings(path, "args", given) if isinstance(given, _MAPPINGS) else {}
        return Content("state_dict", candidates, config, training, why=why)
    if not is_state_dict(loaded):
        return None
    return Content("state_dict", (Candidate("state dict", loaded),), why=("names of tensors",))
