"""`layer_norm` under its name in mamba_ssm 1.x."""

from .layer_norm import RMSNorm, layer_norm_fn, layer_norm_ref, rms_norm_fn, rms_norm_ref

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]
