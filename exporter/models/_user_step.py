"""The decoding step of a model of the user's own, by two methods beside its forward.

    def initial_states(self, batch_size: int) -> tuple[Tensor, ...]:
        '''What is carried from token to token, before the first one: zeros.'''

    def step(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        '''One token: what `forward` takes, of length 1. What it returns for it, and new states.'''

The states have the names of `step`'s parameters. It returns new ones and writes to none. What grows
with each token, as keys and values do, has no size before the first one: a dimension of 0.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.errors import UsageError
from fuseport.exporter.models._stand_ins import under
from fuseport.exporter.models._stepping import PAST, PAST_SIZE, called_by
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec, one_line

__all__ = ["step"]

_METHODS = "step(self, x, *states) -> (output, *new_states) and initial_states(self, batch_size)"
_BATCHES = (2, 3)  # a dimension that follows the batch's size is the batch


def step(
    module: nn.Module,
    config: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    stand_ins: Sequence[str] = (),
) -> Model:
    """One token and the states, as inputs and outputs.

    Args:
        module: of the user's, with its weights.
        config: as `Model` has it.
        specs: of the forward's inputs: one, whose second dimension is time.
        sizes: of their dynamic dimensions.
        stand_ins: for packages that the code imports when it is called.

    Raises:
        UsageError: the module has no step, or not one of this form; the message says what is amiss.
    """
    kind = type(module).__name__
    for name in ("step", "initial_states"):
        if not callable(getattr(module, name, None)):
            raise UsageError(f"program step: {kind} has no method {name}; it takes {_METHODS}")
    if len(specs) != 1 or len(specs[0].dims) < 2 or not isinstance(specs[0].dims[1], str):
        said = ", ".join(f"{spec.name}:{list(spec.dims)}" for spec in specs)
        raise UsageError(
            "program step: the forward must take one input whose second dimension is time, and"
            f" dynamic; it takes {said}"
        )
    batch = specs[0].dims[0]
    token = replace(specs[0], dims=(batch, 1, *specs[0].dims[2:]))
    states = _states(module, batch)
    grows = {dim: PAST_SIZE for state in states for dim in state.dims if dim == PAST}
    return Model(
        module=called_by(module, under(stand_ins, _forward) if stand_ins else _forward),
        architecture="user",
        config=config,
        inputs=(token, *states),
        sizes={dim: sizes[dim] for dim in token.dims if isinstance(dim, str)} | grows,
        outputs=("output", *(f"new_{state.name}" for state in states)),
        differentiable=False,
        stand_ins=tuple(stand_ins),
    )


def _forward(self: Any, *inputs: Tensor) -> Any:
    return self.step(*inputs)


def _states(module: Any, batch: int | str) -> tuple[TensorSpec, ...]:
    probes = _BATCHES if isinstance(batch, str) else (batch, batch)
    first, second = (_initial(module, size) for size in probes)
    if len(first) != len(second):
        raise UsageError("program step: initial_states gives other states for another batch size")
    specs = []
    for name, one, other in zip(_names(module, len(first)), first, second, strict=True):
        if one.any():
            raise UsageError(
                f"program step: initial_states: {name} is not zero: a text begins with zeros;"
                " add what it begins with inside step"
            )
        pairs = list(zip(one.shape, other.shape, strict=False))
        dims = tuple(batch if m != n else m for m, n in pairs)
        if one.dim() != other.dim() or any(m != n and (m, n) != probes for m, n in pairs):
            raise UsageError(f"program step: initial_states: {name} does not follow the batch")
        grown = tuple(PAST if dim == 0 else dim for dim in dims)
        specs.append(TensorSpec(name, str(one.dtype).removeprefix("torch."), grown))
    return tuple(specs)


def _initial(module: Any, size: int) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():
            states = module.initial_states(size)
    except Exception as error:  # the user's code can raise anything
        raise UsageError(f"program step: initial_states({size}): {one_line(error)}") from error
    if not isinstance(states, tuple | list) or not states:
        raise UsageError("program step: initial_states must return a tuple of tensors")
    if not all(isinstance(state, Tensor) for state in states):
        raise UsageError("program step: initial_states must return a tuple of tensors")
    return tuple(states)


def _names(module: Any, count: int) -> list[str]:
    """Of the states: `step`'s parameters after the token."""
    parameters = list(inspect.signature(module.step).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names += [f"state_{i}" for i in range(len(names), count)]
    if len(names) != count:
        raise UsageError(
            f"program step: initial_states gives {count} states, and step takes"
            f" {', '.join(names) or 'none'}"
        )
    return names
