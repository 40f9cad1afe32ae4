"""Anything a weights-only unpickler can make → plain data.

Hyperparameters stay data: a string that names a class is a string here, and nothing imports it.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.checkpoint.allowed import Array, Boxed, Namespace
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput

__all__ = ["TooLargeError", "plain", "settings"]

# A pickle of shared references describes 2**60 nodes in 2 kB, or nests deeper than any stack.
_NODES = 100_000
_DEPTH = 64
_NUMBERS = 4096


class TooLargeError(ValueError):
    """The value nests too deep or unfolds to too much."""


def plain(value: object) -> Any:
    """`value` as dict (of str), list, str, int, float, bool and None.

    Namespaces become dictionaries; tuples, sets and small tensors lists; types, functions and large
    tensors a description.

    Raises:
        TooLargeError: more than 100,000 values, or nested deeper than 64.
    """
    return _Converter().convert(value, 0)


def settings(path: Path, member: str, value: object) -> dict[str, Any]:
    """Arguments of a training script as plain data; what is no mapping stands under `member`.

    Raises:
        CorruptInput: they nest too deep or unfold to too much.
    """
    try:
        result = plain(value)
    except TooLargeError as error:
        raise CorruptInput(
            f"{show(path)}: {member}: {error}; save the weights alone, or with plain settings"
        ) from error
    if result is None:
        return {}
    return result if isinstance(result, dict) else {member: result}


class _Converter:
    def __init__(self) -> None:
        self.nodes = 0

    def convert(self, value: object, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > _NODES or depth > _DEPTH:
            raise TooLargeError(f"more than {_NODES} values, or nested deeper than {_DEPTH}")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Namespace):
            return self.convert(vars(value), depth)
        if isinstance(value, Boxed):
            return self.convert(value.content(), depth + 1)
        if isinstance(value, Array):
            return str(value)
        if isinstance(value, Mapping):
            return {_name(key): self.convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.convert(item, depth + 1) for item in value]
        if isinstance(value, set | frozenset):
            return sorted((self.convert(item, depth + 1) for item in value), key=repr)
        if isinstance(value, Tensor):
            if value.numel() <= _NUMBERS and value.layout == torch.strided:
                return self.convert(value.tolist(), depth + 1)
            return f"tensor {tuple(value.shape)} of {value.dtype}"
        if isinstance(value, bytes | bytearray):
            return bytes(value[:_NUMBERS]).decode("latin-1")
        if isinstance(value, torch.dtype | torch.device | PurePath | complex):
            return str(value)
        return f"<{type(value).__name__}>"


def _name(key: object) -> str:
    return str(key) if isinstance(key, str | int | float | None) else f"<{type(key).__name__}>"
