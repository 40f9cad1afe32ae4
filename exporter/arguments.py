"""What callers from Python may give in more than one form, in the one that the exporter has."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fuseport.exporter.errors import UsageError
from fuseport.exporter.models.given import Given, read_given
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec

__all__ = ["Code", "Examples", "Inputs", "code_of", "given_of", "names_of", "specs_of"]

Code = str | Callable[..., Any]
"""`module:callable`, `file.py:callable`, or a class or function that a file defines."""

Examples = Given | Mapping[str, Tensor] | str | Path
"""Example inputs: tensors by name, or a safetensors file."""

Inputs = str | Iterable[str | TensorSpec]
"""Inputs as texts such as `x:[batch,3,length]`, see `models.user.parse_inputs`; or one alone."""

Name = TypeVar("Name", bound=str)


def names_of(given: Name | Sequence[Name] | None) -> Sequence[Name] | None:
    """Names; one may be given alone."""
    return [given] if isinstance(given, str) else given


def specs_of(given: Inputs | None) -> tuple[TensorSpec, ...] | None:
    """Inputs of a model.

    Raises:
        UsageError: a text is not of the form, or a name is there twice.
    """
    if given is None:
        return None
    each = [given] if isinstance(given, str) else list(given)
    parsed = iter(parse_inputs([text for text in each if isinstance(text, str)]))
    specs = tuple(next(parsed) if isinstance(one, str) else one for one in each)
    for spec in specs:
        if [other.name for other in specs].count(spec.name) > 1:
            raise UsageError(f"inputs: {spec.name} is there twice")
    return specs


def given_of(examples: Examples | None) -> Given | None:
    """Example inputs.

    Raises:
        UsageError, CorruptInput: a file is not as `read_given` wants it.
    """
    if examples is None or isinstance(examples, Given):
        return examples
    if isinstance(examples, Mapping):
        return Given("given", dict(examples))
    return read_given(Path(examples))


def code_of(model: Code | None) -> str | None:
    """Where a model's code is, so that other processes can import it again.

    Raises:
        UsageError: no module has it under its name, or the script that runs alone.
    """
    if model is None or isinstance(model, str):
        return model
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    found = getattr(inspect.getmodule(model), name, None)
    if found is not model or module in (None, "__main__"):
        what = name or f"an instance of {type(model).__name__}"
        raise UsageError(
            f"model: {what}: other processes cannot import it; give a class or function of a "
            "module of its own, or 'module:callable' or 'file.py:callable'"
        )
    return f"{module}:{name}"
