"""Stands in for `selective_scan`, the package of MzeroMiko/VMamba's first half year.

Its functions take no gate, and give u's dtype.
"""

from typing import Any

from torch import Tensor

from fuseport.ops.selective_scan import selective_scan

__all__ = ["SelectiveScanFn", "selective_scan_fn", "selective_scan_ref"]


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    nrows: int = 1,
) -> Tensor:
    """(b, d, l) → (b, d, l), see `fuseport.ops.selective_scan`; `nrows` tunes the CUDA kernel."""
    del nrows
    y = selective_scan(u, delta, A, B, C, D, None, delta_bias, delta_softplus, False)
    assert isinstance(y, Tensor)
    return y


# The package's own reference computes the same, in torch step by step.
selective_scan_ref = selective_scan_fn


class SelectiveScanFn:
    """What code takes that calls the autograd function by name: `SelectiveScanFn.apply(…)`."""

    @staticmethod
    def apply(*args: Any) -> Tensor:
        """`selective_scan_fn`."""
        return selective_scan_fn(*args)
