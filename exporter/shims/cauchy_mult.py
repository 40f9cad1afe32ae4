"""Stands in for `cauchy_mult`, the extension of H3 and of older S4 code."""

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
