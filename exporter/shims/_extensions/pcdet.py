"""Stands in for OpenPCDet's extensions that detectors call with their boxes: for their imports.

Overlaps of boxes, what is pooled inside them, and groups of PV-RCNN's points have no form. Networks
of voxels, pillars and points, which the package imports all at once, call none of them.
"""

from collections.abc import Callable
from typing import NoReturn

from fuseport.exporter.shims._placeholder import refusing

__all__: list[str] = []


def __getattr__(name: str) -> Callable[..., NoReturn]:
    return refusing(
        __name__,
        name,
        f"OpenPCDet's {__name__.rpartition('.')[2]}.{name} was called, of which fuseport's "
        "stand-in has no form: export the network that comes before it",
    )
