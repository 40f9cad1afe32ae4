"""Modules of others that are changed as soon as they have been imported."""

from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["patching"]


def patching(spec: ModuleSpec | None, patch: Callable[[ModuleType], None]) -> ModuleSpec | None:
    """How a module is imported so that it is changed afterwards.

    Args:
        spec: how it is imported otherwise; None where there is none, as then is the result.
        patch: changes the module.
    """
    if spec is not None and spec.loader is not None:
        spec.loader = _Patching(spec.loader, patch)
    return spec


class _Patching(Loader):
    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)
