"""Initial values and dtypes of the parameters of a selective scan (Gu & Dao, 2023, section 3.6)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["kept", "s4d_real", "step_bias", "wide"]


def kept(parameter: nn.Parameter, mark: str) -> nn.Parameter:
    """The parameter, marked for optimizers and initialisers: `_no_weight_decay`, `_no_reinit`."""
    setattr(parameter, mark, True)
    return parameter


def s4d_real(channels: int, states: int, device: Any) -> nn.Parameter:
    """log(1), …, log(N) for each channel: (d, N), float32."""
    row = torch.arange(1, states + 1, dtype=torch.float32, device=device)
    return kept(nn.Parameter(row.log().repeat(channels, 1)), "_no_weight_decay")


def step_bias(
    channels: int, low: float, high: float, floor: float, factory: dict[str, Any]
) -> Tensor:
    """(d,), whose softplus is log-uniform from `low` to `high`, and at least `floor`."""
    span = math.log(high) - math.log(low)
    step = torch.exp(torch.rand(channels, **factory) * span + math.log(low)).clamp(min=floor)
    return step + torch.log(-torch.expm1(-step))  # the inverse of softplus


def wide(parameter: Tensor) -> Tensor:
    """The parameter in float32, or in float64 if it is that."""
    return parameter if parameter.dtype == torch.float64 else parameter.float()
