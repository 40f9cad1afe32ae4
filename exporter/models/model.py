"""What the exporter knows of a model, whatever architecture it has."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec

__all__ = ["Model", "example"]


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
        fused: a context in which the module calls fused ops where its own code does not.
        renamed: brings the checkpoint's tensors under the module's own names.
        notes: what the user should know, a sentence each.
    """

    module: nn.Module
    architecture: str
    config: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int]
    outputs: tuple[str, ...] | None = None
    scans: int | None = None
    keeps_float32: tuple[str, ...] = ()
    fused: Callable[[], AbstractContextManager[None]] = nullcontext
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = _unchanged
    notes: tuple[str, ...] = field(default=())


def example(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """A random tensor of a spec: normal, or uniform over the valid integers.

    Args:
        spec: what to make.
        sizes: of each dynamic dimension.
        generator: on the CPU; the same state gives the same bits.
    """
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.dims]
    if spec.floating:
        return torch.randn(shape, generator=generator).to(spec.torch_dtype)
    high = 2 if spec.dtype == "bool" else spec.high
    assert high is not None, f"{spec.name} has no upper bound"
    return torch.randint(0, high, shape, generator=generator).to(spec.torch_dtype)
