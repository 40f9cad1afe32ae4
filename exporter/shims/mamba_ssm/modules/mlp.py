"""The gated MLP beside layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """fc2(y · activation(gate)), where y and gate are the halves of fc1(x).

    Args:
        in_features: of x.
        hidden_features: of y, rounded up to a multiple; 8/3 of in_features if None.
        out_features: in_features if None.
        activation: of the gate.
        bias: of both projections.
        multiple_of: what the hidden width is a multiple of.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = hidden_features if hidden_features is not None else int(8 * in_features / 3)
        hidden = -(-hidden // multiple_of) * multiple_of
        last = out_features if out_features is not None else in_features
        self.activation = activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, last, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        y, gate = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(y * self.activation(gate))
        return out
