"""Where the classes of a config.json's model are: in transformers, or in a package beside it.

flash-linear-attention writes such folders, by transformers' `save_pretrained`, of models that
transformers does not have. It is imported and called under the stand-ins for its kernels.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

from fuseport.exporter import shims
from fuseport.exporter.models._stand_ins import under

__all__ = ["Library", "library"]

_BESIDE = ("fla",)
"""Packages whose `models` are as transformers' are."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Library:
    """A library of models.

    Attributes:
        module: has the classes, by their names.
        name: with its version.
        stand_ins: under which its code is called, as names of shims.
        used: the packages whose stand-ins it imported.
        beside: what else may have the model, as a part of a message.
    """

    module: Any
    name: str
    stand_ins: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    beside: str = ""

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """The result of a function that calls the library's code."""
        called = under(self.stand_ins, function) if self.stand_ins else function
        result: _Result = called(*args)
        return result

    def classes(self, kind: str, name: str | None) -> tuple[Any, Any]:
        """The classes of a model and of its settings.

        Args:
            kind: the `model_type`.
            name: of the model's class; None for the language model of that kind.

        Raises:
            AttributeError: there is no such model.
            KeyError: there are no settings of the kind.
        """
        transformers = importlib.import_module("transformers")
        if name is None:
            settings = getattr(transformers, _kinds()[kind])
            name = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[settings].__name__
        made: type[Any] = getattr(self.module, name)
        if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
            raise AttributeError(f"{name} is no model")
        if self.module is transformers:
            # By name: in `CONFIG_MAPPING` may be in its place what a package has registered.
            return made, getattr(transformers, _kinds()[kind])
        return made, made.config_class


def library(kind: str) -> Library:
    """That which has models of a `model_type`; transformers for one that is nowhere."""
    transformers = importlib.import_module("transformers")
    here = f"transformers {transformers.__version__}"
    if kind in _kinds():
        return Library(transformers, here)
    for name in _BESIDE:
        if importlib.util.find_spec(name) is None:
            continue
        with shims.installed(shims.AUTO) as used, _names_kept():
            version = getattr(importlib.import_module(name), "__version__", "")
            models = importlib.import_module(f"{name}.models")
        if any(getattr(value, "model_type", None) == kind for value in vars(models).values()):
            return Library(models, f"{name} {version}", (shims.AUTO,), tuple(sorted(used)))
    others = ", ".join(shims.OVERLAID[name] for name in _BESIDE)
    return Library(transformers, here, beside=f", or the package ({others}, for one)")


@contextlib.contextmanager
def _names_kept() -> Iterator[None]:
    """What a package registers does not take the place of what transformers has by that name."""
    automatic = importlib.import_module("transformers").AutoConfig
    register = automatic.register

    def registered(kind: str, *args: Any, **kwargs: Any) -> None:
        if kind not in _kinds():
            register(kind, *args, **kwargs)

    with mock.patch.object(automatic, "register", registered):
        yield


def _kinds() -> Mapping[str, str]:
    """The names of the classes of transformers' own settings, by `model_type`."""
    automatic = importlib.import_module("transformers.models.auto.configuration_auto")
    names: Mapping[str, str] = automatic.CONFIG_MAPPING_NAMES
    return names
