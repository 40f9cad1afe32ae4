"""Anything a weights-only unpickler can make → plain data.

Hyperparameters stay data: a string that names a class is a string here, and nothing imports it.
"""

from collections.abc import Mapping
from contextlib import suppress
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
# One text of a megabyte may stand in a hundred thousand places.
_CHARACTERS = 2**24
_BITS = 1024  # no setting is a larger integer, and Python prints those of 4,300 digits no more


class TooLargeError(ValueError):
    """The value nests too deep or unfolds to too much."""


def plain(value: object) -> Any:
    """`value` as dict (of str), list, str, int, float, bool and None.

    Namespaces become dictionaries; tuples, sets and small tensors lists; types, functions, large
    tensors and integers of over 1,024 bits a description. Text is Unicode: halves of characters of
    UTF-16 are written as escapes.

    Raises:
        TooLargeError: more than 100,000 values, nested deeper than 64, or over 16 MiB of text.
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
        self.characters = 0

    def convert(self, value: object, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > _NODES or depth > _DEPTH:
            raise TooLargeError(f"more than {_NODES} values, or nested deeper than {_DEPTH}")
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int) and value.bit_length() > _BITS:
            return f"<int of {value.bit_length()} bits>"
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Namespace):
            return self.convert(vars(value), depth)
        if isinstance(value, Boxed):
            return self.convert(Boxed.content(value), depth + 1)
        if isinstance(value, Array):
            return str(value)
        if isinstance(value, Mapping):
            return {self._name(key): self.convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.convert(item, depth + 1) for item in value]
        if isinstance(value, set | frozenset):
            return sorted((self.convert(item, depth + 1) for item in value), key=repr)
        if isinstance(value, Tensor):
            return self._tensor(value, depth)
        if isinstance(value, bytes | bytearray):
            return bytes(value[:_NUMBERS]).decode("latin-1")
        if isinstance(value, torch.dtype | torch.device | PurePath | complex):
            return str(value)
        return f"<{type(value).__name__}>"

    def _text(self, value: str) -> str:
        self.characters += len(value)
        if self.characters > _CHARACTERS:
            raise TooLargeError(f"over {_CHARACTERS} characters of text")
        return value.encode("utf-8", "backslashreplace").decode()

    def _name(self, key: object) -> str:
        known = isinstance(key, str | int | float | None)
        return self._text(str(self.convert(key, 0)) if known else f"<{type(key).__name__}>")

    def _tensor(self, tensor: Tensor, depth: int) -> Any:
        if tensor.is_nested:
            return f"nested tensor of {tensor.dtype}"
        if tensor.numel() <= _NUMBERS and tensor.layout == torch.strided:
            with suppress(
                RuntimeError
            ):  # without data, or of a dtype that Python has no numbers for
                return self.convert(tensor.tolist(), depth + 1)
        return f"tensor {tuple(tensor.shape)} of {tensor.dtype}"
