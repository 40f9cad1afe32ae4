"""Packed sequences in the mixers of fla: what is before one has decayed to nothing."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._sizes import always
from fuseport.ops.packed import Packed

__all__ = ["apart", "numbers", "refuse_states", "spared"]


def apart(g: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Logarithms of decays, (b, l, …), which are -∞ where sequences begin."""
    begins = Packed.of(cu_seqlens, g.shape[1]).begins()
    return g.masked_fill(begins.reshape(-1, *[1] * (g.dim() - 2)), float("-inf"))


def numbers(cu_seqlens: Tensor, steps: int) -> Tensor:
    """(1, l), int32: the number of each step's sequence."""
    return Packed.of(cu_seqlens, steps).sequence.int().unsqueeze(0)


def refuse_states(initial_state: Tensor | None, output_final_state: bool | None) -> None:
    """Raises NotImplementedError if there are states, of which sequences would have one each."""
    if initial_state is not None or output_final_state:
        raise NotImplementedError(
            "with cu_seqlens, and states, which packed sequences have none of"
        )


def spared(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Mixers that get one step more, which is in no sequence, where there may be no steps at all.

    A mask that keeps nothing leaves none, and ONNX Runtime's `Scan`, up to 1.31 at least, refuses
    to go over none. The first argument is (b, l, …), as is the first result.
    """
    return {name: _spared(function) for name, function in functions.items()}


def _spared(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    if "cu_seqlens" not in signature.parameters:
        return function

    @wraps(function)
    def mixer(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        steps = next(iter(bound.arguments.values())).shape[1]
        if bound.arguments.get("cu_seqlens") is None or always(steps > 0):
            return function(*args, **kwargs)
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor) and value.dim() > 2 and always(value.shape[1] == steps):
                bound.arguments[name] = F.pad(value, [0, 0] * (value.dim() - 2) + [0, 1])
        found = function(*bound.args, **bound.kwargs)
        if isinstance(found, Tensor):
            return found[:, :steps]
        out, *states = found
        return out[:, :steps], *states

    return mixer
