"""SwiGLU between linear layers, over the registered op."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.swiglu import swiglu as op_of_parts

__all__ = ["SwiGLU", "swiglu", "swiglu_packed"]


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: Any = None,
) -> Tensor:
    """(SiLU(x·w1ᵀ + b1) · (x·w2ᵀ + b2))·w3ᵀ + b3.

    Args:
        x: (…, d).
        w1: (e, d).
        b1: (e,), or None.
        w2: (e, d).
        b2: (e,), or None.
        w3: (f, e).
        b3: (f,), or None.
        op: has no effect.

    Returns:
        (…, f).
    """
    return F.linear(op_of_parts(F.linear(x, w1, b1), F.linear(x, w2, b2)), w3, b3)


def swiglu_packed(
    x: Tensor, w1w2: Tensor, b1b2: Tensor | None, w3: Tensor, b3: Tensor | None, *, op: Any = None
) -> Tensor:
    """`swiglu` of both weights in one tensor, (2, e, d), and both biases, (2, e)."""
    b1, b2 = (None, None) if b1b2 is None else b1b2.unbind()
    return swiglu(x, w1w2[0], b1, w1w2[1], b2, w3, b3, op=op)


class SwiGLU(nn.Module):
    """Three linear layers with SwiGLU, the first two as one unless `_pack_weights` is False.

    Args:
        in_features: of x.
        hidden_features: of the product; 0 or None for in_features.
        out_features: of the result; None for in_features.
        bias: whether the layers have biases.
    """

    w12: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden_features = hidden_features or in_features
        self.out_features = out_features or in_features
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * self.hidden_features, bias=bias)
        else:
            self.w12 = None
            self.w1 = nn.Linear(in_features, self.hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, self.hidden_features, bias=bias)
        self.w3 = nn.Linear(self.hidden_features, self.out_features, bias=bias)
        self.op: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        if self.w12 is None:
            gate, value = self.w1(x), self.w2(x)
        else:
            gate, value = self.w12(x).chunk(2, -1)
        out: Tensor = self.w3(op_of_parts(gate, value))
        return out
