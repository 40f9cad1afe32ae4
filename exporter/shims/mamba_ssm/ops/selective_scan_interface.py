"""The functions of the selective scan and of Mamba-1's inner block, over the registered op."""

from typing import Any

from torch import Tensor

from fuseport.ops.compositions.bimamba_inner import bimamba_inner_fn
from fuseport.ops.compositions.mamba_inner import mamba_inner_fn, mamba_inner_fn_no_out_proj
from fuseport.ops.selective_scan import selective_scan

__all__ = [
    "SelectiveScanFn",
    "bimamba_inner_fn",
    "bimamba_inner_ref",
    "mamba_inner_fn",
    "mamba_inner_fn_no_out_proj",
    "mamba_inner_ref",
    "selective_scan_fn",
    "selective_scan_ref",
]


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op, see `fuseport.ops.selective_scan`.

    The last state has its gradient, which the CUDA extension leaves out.
    """
    return selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


class SelectiveScanFn:
    """What code takes that calls the autograd function by name: `SelectiveScanFn.apply(…)`."""

    @staticmethod
    def apply(*args: Any) -> Any:
        """`selective_scan_fn`."""
        return selective_scan_fn(*args)


# The package's own references compute the same, in torch step by step.
selective_scan_ref = selective_scan_fn
mamba_inner_ref = mamba_inner_fn
bimamba_inner_ref = bimamba_inner_fn
