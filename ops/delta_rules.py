"""What the delta rules' checks have alike; `native/rule_torch.hpp` has the same for C++."""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = ["check_backward", "check_floating", "wide_of"]


def wide_of(q: Tensor) -> torch.dtype:
    """The dtype that is computed in: float64 for a q of float64, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def check_floating(op: str, q: Tensor) -> None:
    """Raises ValueError unless q has one of the dtypes that rules take."""
    meaning = "float16, bfloat16, float32 or float64"
    require(q.dtype in FLOATING, op, "q", meaning, dtype_name(q.dtype))


def check_backward(op: str, dout: Tensor, dfinal_state: Tensor, q: Tensor, v: Tensor) -> None:
    """Raises ValueError unless cotangents fit inputs that passed their checks.

    Args:
        op: the operator's name.
        dout: of the outputs, like v.
        dfinal_state: of the last state, (batch, H, K, V).
        q: (batch, l, heads, K).
        v: (batch, l, H, V).
    """
    require_like(op, "dout", dout, q.dtype, q, "q")
    require_shape(op, "dout", dout, "v's shape", tuple(v.shape))
    require_like(op, "dfinal_state", dfinal_state, wide_of(q), q, "q")
    shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    require_shape(op, "dfinal_state", dfinal_state, "the state's shape", shape)
