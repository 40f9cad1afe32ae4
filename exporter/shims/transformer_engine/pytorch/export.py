"""The package's own way to ONNX, of which nothing is needed here."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]

te_translation_table: Mapping[Any, Callable[..., Any]] = {}
"""Empty: layers are made of torch's operators and fuseport's."""


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Nothing."""
    yield


def is_in_onnx_export_mode() -> bool:
    """No."""
    return False
