"""Part of the stand-in for `flash_attn`; see its root."""
