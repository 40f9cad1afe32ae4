"""MLPs of two layers, with a gate or without."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.activations import swiglu
from ..ops.fused_dense import FusedMLP, ParallelFusedMLP, refuse_parallel

__all__ = [
    "FusedMLP",
    "GatedMlp",
    "Mlp",
    "ParallelFusedMLP",
    "ParallelGatedMlp",
    "ParallelMLP",
]


class Mlp(nn.Module):
    """fc2(activation(fc1(x))), with its input if wanted.

    Args:
        in_features: of x.
        hidden_features: between; four times in_features if None.
        out_features: in_features if None.
        activation: between.
        bias1: whether fc1 has a bias.
        bias2: whether fc2 has one.
        return_residual: whether x is returned too.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = in_features * 4 if hidden_features is None else hidden_features
        last = in_features if out_features is None else out_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, last, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        """(…, in_features) → (…, out_features)."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    """fc2(y · activation(gate)), y and gate the halves of fc1(x), with its input if wanted.

    Args:
        in_features: of x.
        hidden_features: of y, rounded up to a multiple; 8/3 of in_features if None.
        out_features: in_features if None.
        activation: of the gate.
        bias1: whether fc1 has a bias.
        bias2: whether fc2 has one.
        multiple_of: what the hidden width is a multiple of.
        return_residual: whether x is returned too.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        last = in_features if out_features is None else out_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, last, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        """(…, in_features) → (…, out_features)."""
        y, gate = self.fc1(x).chunk(2, -1)
        y = swiglu(gate, y) if self.activation is F.silu else y * self.activation(gate)
        y = self.fc2(y)
        return (y, x) if self.return_residual else y


class ParallelMLP(nn.Module):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_parallel(type(self).__name__)


class ParallelGatedMlp(nn.Module):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_parallel(type(self).__name__)
