"""What all layers have: initial values, the dtype that they compute in, and no scales of FP8."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._compute import autocast_dtype
from .._refused import refuse_parallel

__all__ = ["Init", "Scaled", "TransformerEngineBaseModule", "normal"]

Init = Callable[[Tensor], Any]

_SCALES = "_extra_state"


def normal(weight: Tensor) -> Tensor:
    """Initial values of weights, where a layer is given no function for them."""
    return nn.init.normal_(weight, std=0.023)


class Scaled(nn.Module):
    """What may have `_extra_state` in a state dict, which has no effect: it is of FP8."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + _SCALES in missing_keys:
            missing_keys.remove(prefix + _SCALES)


class TransformerEngineBaseModule(Scaled):
    """A layer, whose `_extra_state` is empty, as it is of the package's outside of FP8.

    Args:
        name: has no effect.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.tp_group = None
        self.tp_size = 1
        self._initial: dict[str, Init] = {}

    def add_parameter(
        self, name: str, shape: Sequence[int], init: Init, device: Any, dtype: torch.dtype | None
    ) -> None:
        """A parameter of torch's default dtype if none is given, with its initial values."""
        empty = torch.empty(*shape, device=device, dtype=dtype)
        parameter = nn.Parameter(empty)
        self.register_parameter(name, parameter)
        self._initial[name] = init
        if not empty.is_meta:
            with torch.no_grad():
                init(parameter)

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initial values again, and memory for what is on the meta device; not where deferred."""
        if defer_init:
            return
        for name, init in self._initial.items():
            parameter = getattr(self, name)
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                self.register_parameter(name, parameter)
            with torch.no_grad():
                init(parameter)

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """That of `torch.autocast` around it, or x's.

        Raises:
            TypeError: x is of another dtype than a parameter, outside of autocast.
        """
        dtype = autocast_dtype(x)
        if dtype is not None:
            return dtype
        for name, parameter in self.named_parameters():
            if parameter.dtype != x.dtype:
                raise TypeError(
                    f"transformer_engine's {type(self).__name__} was given {x.dtype}, and its "
                    f"{name} is {parameter.dtype}: outside of autocast they are of one dtype"
                )
        return x.dtype

    def fast_setattr(self, name: str, value: Any) -> None:
        """Sets an attribute."""
        setattr(self, name, value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Refuses a group of more than one process."""
        refuse_parallel(type(self).__name__, tp_group, 1)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses a group of more than one process."""
        for group in cp_group if isinstance(cp_group, list) else [cp_group]:
            refuse_parallel(type(self).__name__, group, 1)

    def reset_fp8_meta_tensors(self) -> None:
        """Nothing: there are no scales."""

    def get_extra_state(self) -> Tensor:
        """(0,), uint8."""
        return torch.empty(0, dtype=torch.uint8)
