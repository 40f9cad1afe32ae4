"""Inputs of the chunked scan whose states hardly matter: the skip carries x, as in some models.

The gradient of A is 1e-8 then. What lies between steps of a chunk cancels in it, whatever its
rounding: in plain float32 sums it would be off by 1e-5 to 1e-4 of its size.
"""

import torch
from torch import Tensor

from fuseport.ops import OPS
from fuseport.ops.spec import Inputs

__all__ = ["error_of_gradient", "faint"]

SPEC = OPS["ssd_chunk_scan"]


def faint(dtype: torch.dtype, seed: int) -> tuple[Inputs, Inputs]:
    """Inputs and cotangents, drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)

    def randn(scale: float, *shape: int) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    cotangents = {"dout": randn(0.2, 1, 65, 4, 16), "dfinal_states": torch.zeros(1, 4, 16, 8)}
    inputs = {
        "x": randn(0.004, 1, 65, 4, 16),
        "dt": randn(0.1, 1, 65, 4),
        "A": -torch.arange(1.0, 5.0),
        "B": randn(0.003, 1, 65, 1, 8),
        "C": randn(0.003, 1, 65, 1, 8),
        "D": torch.ones(4, 16),
        "dt_bias": torch.ones(4),
        "initial_states": torch.zeros(1, 4, 16, 8),
        "seq_idx": torch.zeros(1, 65, dtype=torch.int32),
        "dt_limit": torch.tensor([0.0, float("inf")]),
        "dt_softplus": True,
    }
    return inputs, cotangents


def error_of_gradient(found: Tensor, inputs: Inputs, cotangents: Inputs) -> float:
    """The largest error of A's gradient, as a part of the gradient's largest value."""
    wide = [
        t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in (*cotangents.values(), *inputs.values())
    ]
    exact = SPEC.operator("ssd_chunk_scan_backward").reference(*wide)[2]
    return float((found.double() - exact).abs().max() / exact.abs().max())
