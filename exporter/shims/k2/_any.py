"""Stands in for k2's modules, of which any name may be imported and none is computed."""

from fuseport.exporter.shims._placeholder import unusable


def __getattr__(name: str) -> type:
    return unusable(__name__, name)
