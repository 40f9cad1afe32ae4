"""A bare state dict as torch.save writes it, or under the key where training scripts put it."""

from pathlib import Path

from torch import Tensor

from fuseport.exporter.checkpoint.content import Content, only_tensors

__all__ = ["recognise"]

# In this order: where a file has `state_dict` and `model`, `model` may be an architecture's name.
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_AVERAGED = ("model_ema", "state_dict_ema", "ema")


def recognise(path: Path, loaded: object) -> Content | None:
    """The weights, and a note where the file also holds averaged ones, which are not used.

    Raises:
        CorruptInput: a tensor in it that is not dense.
    """
    if not isinstance(loaded, dict):
        return None
    for wrapper in _WRAPPERS:
        inner = loaded.get(wrapper)
        if isinstance(inner, dict) and _has_tensors(inner):
            tensors, notes = only_tensors(path, wrapper, inner)
            notes += tuple(
                f"{name} is in the file too; the weights of {wrapper} are used"
                for name in _AVERAGED
                if isinstance(loaded.get(name), dict)
            )
            return Content("state_dict", tensors, {}, notes)
    if not _has_tensors(loaded):
        return None
    tensors, notes = only_tensors(path, "state dict", loaded)
    return Content("state_dict", tensors, {}, notes)


def _has_tensors(mapping: dict[object, object]) -> bool:
    return any(isinstance(k, str) and isinstance(v, Tensor) for k, v in mapping.items())
