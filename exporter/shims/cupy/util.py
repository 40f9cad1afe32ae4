"""Stands in for `cupy.util`, where older versions have their cache of functions."""

from fuseport.exporter.shims._cupy import memoize

__all__ = ["memoize"]
