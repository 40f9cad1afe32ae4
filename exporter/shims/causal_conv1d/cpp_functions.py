"""The calls that other packages make of causal_conv1d, from its version 1.5 on."""

from fuseport.exporter.shims._conv import bwd as causal_conv1d_bwd_function
from fuseport.exporter.shims._conv import fwd as causal_conv1d_fwd_function
from fuseport.exporter.shims._conv import update as causal_conv1d_update_function

__all__ = [
    "causal_conv1d_bwd_function",
    "causal_conv1d_fwd_function",
    "causal_conv1d_update_function",
]
