"""Example inputs that the user gives as tensors: `--inputs samples.safetensors`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint.safetensors_file import read_safetensors
from fuseport.exporter.errors import UsageError
from fuseport.exporter.models._forward import ordered
from fuseport.exporter.models._places import volume_of
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec

__all__ = [
    "Dynamic",
    "Given",
    "checked",
    "fitted",
    "flat",
    "named",
    "parse_dynamic",
    "parse_sizes",
    "read_given",
    "specs_of",
    "undefined",
]

Dynamic = Mapping[str, Mapping[int, str]]
"""By input and position, the names of dynamic dimensions."""

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")


@dataclass(frozen=True)
class Given:
    """Example inputs of the user's.

    Attributes:
        place: the file, as messages name it.
        values: by the input's name.
    """

    place: str
    values: Mapping[str, Tensor]


def read_given(path: Path) -> Given:
    """The tensors of a safetensors file, as inputs.

    Raises:
        UsageError: there is no such file, it is empty, or a dtype is none that inputs have.
        CorruptInput: it is not in the format.
    """
    if not path.is_file():
        hint = f"; shapes are --input-shapes '{path}'" if "[" in path.name else ""
        raise UsageError(f"--inputs {path}: there is no such file{hint}")
    return checked(Given(str(path), read_safetensors(path)))


def checked(given: Given) -> Given:
    """The same examples, if they can be inputs.

    Raises:
        UsageError: there is none, or one is empty, or of a dtype that inputs do not have.
    """
    place = f"--inputs {given.place}"
    if not given.values:
        raise UsageError(f"{place}: there is no tensor in it")
    for name, tensor in given.values.items():
        if _dtype(tensor) not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise UsageError(f"{place}: {name} is {_dtype(tensor)}, none of {known}")
        if not tensor.numel():
            raise UsageError(f"{place}: {name} is of shape {tuple(tensor.shape)}: empty")
    return given


def flat(values: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """The same without containers: what is in mappings and sequences by dotted names.

    Args:
        values: by name.
        before: what these names begin with.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def undefined(given: Given) -> list[str]:
    """A note on each example that has NaN in it."""
    return [
        f"{name} of {given.place} has {count} NaN: where an output or gradient is NaN throughout, "
        "in float64 too, verify has nothing to compare, and says unsupported"
        for name, tensor in given.values.items()
        if (count := int(tensor.isnan().sum()))
    ]


def parse_dynamic(texts: Sequence[str]) -> Dynamic:
    """Dynamic dimensions as users write them: `x:{0:batch,1:length}`, with commas between inputs.

    Raises:
        UsageError: a text is not of that form, or names an input again.
    """
    found: dict[str, dict[int, str]] = {}
    parts = [(text, part) for text in texts for part in re.split(r"(?<=\}),", _bare(text))]
    for text, part in parts:
        match = re.fullmatch(r"(\w[\w.]*):\{((?:\d+:[A-Za-z_]\w*(?:,|(?=\})))*)\}", part)
        if match is None:
            raise UsageError(
                f"--dynamic {text}: write INPUT:{{POSITION:NAME,…}} for each input, for example "
                "x:{0:batch,1:length}"
            )
        if match[1] in found:
            raise UsageError(f"--dynamic {text}: {match[1]} is there twice; name all in one")
        pairs = [pair.split(":") for pair in match[2].split(",") if pair]
        found[match[1]] = {int(position): name for position, name in pairs}
    return found


def _bare(text: str) -> str:
    return "".join(text.split())


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes of dynamic dimensions as users write them: `length=1024,batch=2`.

    Raises:
        UsageError: the text is not of that form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name.strip() or not number.isdecimal() or int(number) < 1:
            raise UsageError(f"--size {text}: write DIM=N,DIM=N with numbers from 1 up")
        sizes[name.strip()] = int(number)
    return sizes


def specs_of(given: Given, module: nn.Module) -> tuple[TensorSpec, ...]:
    """The inputs of a module, in the order of its forward, every dimension fixed.

    Raises:
        UsageError: the names are not those of the module's forward; see `_forward.ordered`.
    """
    specs = [_spec(name, given.values[name]) for name in sorted(given.values)]
    return ordered(module, specs, f"--inputs {given.place}: ")


def named(specs: Sequence[TensorSpec], dynamic: Dynamic) -> tuple[TensorSpec, ...]:
    """The same inputs, with dynamic dimensions as the user names them.

    Raises:
        UsageError: there is no such input or dimension.
    """
    known = {spec.name: spec for spec in specs}
    for name, dims in dynamic.items():
        if name not in known:
            raise UsageError(f"--dynamic {name}: it is not an input; there are: {', '.join(known)}")
        for position in dims:
            if position >= len(known[name].dims):
                rank = len(known[name].dims)
                raise UsageError(f"--dynamic {name}: it has {rank} dimensions, and no {position}")
    return tuple(
        replace(
            spec,
            dims=tuple(dynamic.get(spec.name, {}).get(i, dim) for i, dim in enumerate(spec.dims)),
        )
        for spec in specs
    )


def fitted(model: Model, given: Given) -> Model:
    """The model with the user's values as its example, at their sizes.

    Raises:
        UsageError: they do not fit its inputs, or dimensions of one name differ in size.
    """
    specs = {spec.name: spec for spec in model.inputs}
    if specs.keys() != given.values.keys():
        raise UsageError(
            f"--inputs {given.place}: the model takes {', '.join(specs)}, and it has "
            f"{', '.join(given.values)}"
        )
    sizes: dict[str, int] = {}
    for name, spec in specs.items():
        tensor = given.values[name]
        if _dtype(tensor) != spec.dtype or tensor.dim() != len(spec.dims):
            raise UsageError(
                f"--inputs {given.place}: {name} is {_dtype(tensor)}{list(tensor.shape)}, and the "
                f"model takes {spec.dtype}[{', '.join(map(str, spec.dims))}]"
            )
        low, high = spec.low, spec.high
        if isinstance(high, int) and not low <= tensor.min() <= tensor.max() < high:
            raise UsageError(
                f"--inputs {given.place}: {name} has values outside of {low} to {high - 1}"
            )
        if isinstance(spec.high, tuple) and not _within(tensor, spec.high):
            raise UsageError(
                f"--inputs {given.place}: {name} has values outside of its columns' bounds, "
                f"{'x'.join(map(str, spec.high))}"
            )
        for i, (dim, size) in enumerate(zip(spec.dims, tensor.shape, strict=True)):
            wanted = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
            if size != wanted:
                raise UsageError(
                    f"--inputs {given.place}: dimension {i} of {name} ({dim}) is {size}, not "
                    f"{wanted}"
                )
    return replace(model, sizes=sizes, given={name: given.values[name] for name in specs})


def _within(rows: Tensor, volume: Sequence[int]) -> bool:
    if rows.shape[-1] != len(volume):
        return False
    return bool(((rows >= 0) & (rows < torch.tensor(volume))).all())


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    integers = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if not integers:
        return TensorSpec(name, _dtype(tensor), tuple(tensor.shape))
    volume = volume_of(tensor)
    if volume is not None:
        return TensorSpec(name, _dtype(tensor), tuple(tensor.shape), volume)
    high, low = max(1, int(tensor.max()) + 1), min(1, int(tensor.min()))  # of lengths, 0 is none
    return TensorSpec(name, _dtype(tensor), tuple(tensor.shape), high, low)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
