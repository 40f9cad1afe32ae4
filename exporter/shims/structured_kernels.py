"""Stands in for `structured_kernels`, the extension of state-spaces/s4."""

from fuseport.exporter.shims._structured import (
    cauchy_mult_sym_bwd,
    cauchy_mult_sym_fwd,
    vand_log_mult_sym_bwd,
    vand_log_mult_sym_fwd,
)

__all__ = [
    "cauchy_mult_sym_bwd",
    "cauchy_mult_sym_fwd",
    "vand_log_mult_sym_bwd",
    "vand_log_mult_sym_fwd",
]
