"""Part of the stand-in for `mamba_ssm`; see its root."""
