"""What the exporter knows of a model, whatever architecture it has."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.errors import UsageError
from fuseport.exporter.models._places import places
from fuseport.exporter.program import Entry, TensorSpec, named_outputs

__all__ = [
    "OWN_CODE",
    "Model",
    "at",
    "continued",
    "example",
    "examples",
    "named",
    "up_to_a_dimension",
]

OWN_CODE = "give your own code: --model your_code.py:Model --input-shapes 'x:[batch,length,64]'"
"""What to do about a checkpoint of which no architecture is known."""


def _unchanged(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors


@dataclass(frozen=True)
class Model:
    """A module, and what it takes to export it and to build it again.

    Attributes:
        module: takes the inputs by position.
        architecture: the name of the file it comes from.
        config: JSON data from which that file builds it again.
        inputs: what `module.forward` takes, in order.
        sizes: the example size of each dynamic dimension.
        outputs: names for outputs that the module returns without one; None for `output`.
        scans: the number of scan nodes that a captured program must have; None if unknown.
        keeps_float32: ends of the names of parameters that stay float32 in half precision.
        given: example inputs of the user's, at `sizes`; None for random ones.
        fused: a context in which the module calls fused ops where its own code does not.
        renamed: brings the checkpoint's tensors under the module's own names.
        notes: what the user should know, a sentence each.
        step: for models that decode token by token: one step of that, as a model over the very
            same parameters, so of the dtypes that they have by then. Its first input and output are
            of one token; the others are states, an input and an output for each, in one order.
            None for other models; it raises UsageError where only this one has none.
        differentiable: whether gradients of the module can be asked for.
        stand_ins: packages that the user's code may import while it is called, as names of shims;
            the module puts their stand-ins on the import path by itself.
        general: whether the module may be any code, the user's own or a package's: what it takes
            can be said otherwise, it is run once before anything is made of it, and `config` keeps
            its `inputs`, and of what it does its `functions` and `shims`.
    """

    module: nn.Module
    architecture: str
    config: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int]
    outputs: tuple[str, ...] | None = None
    scans: int | None = None
    keeps_float32: tuple[str, ...] = ()
    given: Mapping[str, Tensor] | None = None
    fused: Callable[[], AbstractContextManager[None]] = nullcontext
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = _unchanged
    notes: tuple[str, ...] = field(default=())
    step: "Callable[[], Model] | None" = None
    differentiable: bool = True
    stand_ins: tuple[str, ...] = ()
    general: bool = False


def examples(model: Model, generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs to run a model on: the user's, or random ones."""
    if model.given is not None:
        return dict(model.given)
    return {spec.name: example(spec, model.sizes, generator) for spec in model.inputs}


def named(model: Model, result: Any) -> dict[str, Tensor]:
    """What the model's module returned, by name; see `program.named_outputs`."""
    return named_outputs(result, model.outputs, [spec.name for spec in model.inputs])


def at(model: Model, entry: Entry) -> Model:
    """The model itself, or its decoding step.

    Raises:
        UsageError: it has no decoding step.
        Missing: of its step something is not here.
    """
    if entry == "forward":
        return model
    if model.step is None:
        raise UsageError(
            f"program step: a model of the architecture {model.architecture} has no decoding step"
            " here; language models of tokens have one, and your own with a method step"
        )
    return model.step()


def example(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """A random tensor of a spec: normal, or uniform over the valid integers; see `places` of rows.

    Of lengths the first is the largest that there can be: a batch is as long as the longest in it.

    Args:
        spec: what to make.
        sizes: of each dynamic dimension.
        generator: on the CPU; the same state gives the same bits.
    """
    shape = spec.shape(sizes)
    if spec.floating:
        return torch.randn(shape, generator=generator).to(spec.torch_dtype)
    high = 2 if spec.dtype == "bool" else spec.high
    assert high is not None, f"{spec.name} has no upper bound"
    if isinstance(high, tuple):
        if shape[-1] == len(high):
            rows = places(math.prod(shape[:-1]), high, generator)
            return rows.reshape(shape).to(spec.torch_dtype)
        high = max(high)  # the columns turned out to be a dynamic dimension
    if isinstance(high, str):
        dim, more, _ = high.partition("+")
        high = sizes[dim] + bool(more)
    high = max(high, spec.low + 1)  # where no value is valid, the model may refuse one
    drawn = torch.randint(spec.low, high, shape, generator=generator).to(spec.torch_dtype)
    if up_to_a_dimension(spec):
        drawn[:1] = high - 1
    return drawn.sort(descending=True).values if spec.descending else drawn


def continued(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Of a shape, as many dimensions as there are: cut, or going on as it ends, along each.

    Args:
        tensor: of at least one element.
        shape: to have.
    """
    for dim, (size, own) in enumerate(zip(shape, tensor.shape, strict=True)):
        tensor = tensor.index_select(dim, torch.arange(size).clamp(max=own - 1))
    return tensor


def up_to_a_dimension(spec: TensorSpec) -> bool:
    """Whether an input is a vector of integers up to a dynamic dimension, such as lengths."""
    return isinstance(spec.high, str) and spec.high.endswith("+1") and len(spec.dims) == 1
