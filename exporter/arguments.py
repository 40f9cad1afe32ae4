"""What callers from Python may give in more than one form, in the one that the exporter has."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fuseport.exporter.errors import UsageError
from fuseport.exporter.models.given import (
    Dynamic,
    Given,
    checked,
    flat,
    parse_dynamic,
    parse_sizes,
    read_given,
)
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import KINDS, Kind, TensorSpec
from fuseport.exporter.verify.compare import Tolerance
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = [
    "Code",
    "Examples",
    "Inputs",
    "code_of",
    "dtype_of",
    "dynamic_of",
    "given_of",
    "kinds_of",
    "names_of",
    "sizes_of",
    "specs_of",
    "tolerances_of",
]

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


def kinds_of(given: Kind | Sequence[Kind]) -> Sequence[Kind]:
    """Kinds of programs.

    Raises:
        UsageError: there is none of a name, or none is named.
    """
    kinds = names_of(given) or ()
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"{kind} is not a program; there are: {', '.join(KINDS)}")
    if not kinds:
        raise UsageError(f"programs: name one at least, of {', '.join(KINDS)}")
    return kinds


def specs_of(given: Inputs | None) -> tuple[TensorSpec, ...] | None:
    """Inputs of a model.

    Raises:
        UsageError: one is neither a text of the form nor a `TensorSpec`, or a name is there twice.
    """
    if given is None:
        return None
    each = [given] if isinstance(given, str) else list(given)
    for one in each:
        if not isinstance(one, str | TensorSpec):
            raise UsageError(
                f"inputs: a {_type(one)}, where a text such as x:[batch,3,length] is "
                "wanted; tensors are for `given`, by name"
            )
    # Texts beside each other are one: a bound may be a dimension of another input.
    specs: tuple[TensorSpec, ...] = ()
    for kind, some in groupby(each, type):
        group: list[Any] = list(some)
        specs += parse_inputs(group) if kind is str else tuple(group)
    for spec in specs:
        if [other.name for other in specs].count(spec.name) > 1:
            raise UsageError(f"inputs: {spec.name} is there twice")
    return specs


def given_of(examples: Examples | None) -> Given | None:
    """Example inputs, contiguous and with memory of their own.

    Raises:
        UsageError, CorruptInput: they are no tensors by name, or a file is not as `read_given`
            wants it.
    """
    if examples is None or isinstance(examples, Given):
        return examples
    if isinstance(examples, str | Path):
        return read_given(Path(examples))
    if not isinstance(examples, Mapping):
        raise UsageError(f"given: tensors by name, or a safetensors file, not a {_type(examples)}")
    values = {}
    for name, value in flat(examples).items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(tensor, Tensor):
            raise UsageError(f"given: {name} is a {_type(value)}, which is no tensor")
        values[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return checked(Given("given", values))


def dynamic_of(given: Dynamic | str | Sequence[str] | None) -> Dynamic | None:
    """Names of dynamic dimensions, by input and position, or as `x:{0:batch,1:length}`.

    Raises:
        UsageError: they are neither.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return parse_dynamic([given] if isinstance(given, str) else given)
    for name, dims in given.items():
        if not isinstance(dims, Mapping):
            raise UsageError(f"dynamic: {name} wants names by position, such as {{0: 'batch'}}")
    return given


def sizes_of(given: Mapping[str, int] | str | None) -> Mapping[str, int] | None:
    """Sizes by dimension, or as `length=64,batch=2`."""
    return parse_sizes(given) if isinstance(given, str) else given


def dtype_of(given: str | torch.dtype | None) -> str | None:
    """A dtype's name."""
    return str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given


def tolerances_of(given: Tolerance | Tolerances | float | None) -> Tolerances | None:
    """Tolerances by tensor; a number is an absolute one of all."""
    if given is None or isinstance(given, Tolerances):
        return given
    one = given if isinstance(given, Tolerance) else Tolerance(float(given), 0.0)
    return Tolerances.everywhere(one)


def _type(value: object) -> str:
    return type(value).__name__


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
        what = name or f"an instance of {_type(model)}"
        raise UsageError(
            f"model: {what}: other processes cannot import it; give a class or function of a "
            "module of its own, or 'module:callable' or 'file.py:callable'"
        )
    return f"{module}:{name}"
