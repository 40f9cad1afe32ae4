"""The rotary kernel's call."""

from fuseport.exporter.shims._rotary import apply_rotary

__all__ = ["apply_rotary"]
