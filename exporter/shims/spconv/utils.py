"""What makes voxels of points and compares boxes, in C++ there: it may be imported, not called."""

from contextlib import nullcontext
from typing import Any

from fuseport.exporter.shims._placeholder import refusing

__all__ = ["nullcontext"]

_BOXES = (
    "non_max_suppression_cpu",
    "rbbox_intersection",
    "rbbox_iou",
    "rbbox_iou_loss",
    "rotate_non_max_suppression_cpu",
)
_VOXELS = tuple(f"Point2Voxel{of}{n}d" for of in ("CPU", "GPU") for n in (1, 2, 3, 4))


def __getattr__(name: str) -> Any:
    # Other names are of spconv 1, by which code tells the two apart.
    if name not in (*_BOXES, *_VOXELS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    what = "its voxels, made before it" if name in _VOXELS else "to do that after it"
    return refusing(
        __name__,
        name,
        f"spconv.utils.{name} was called, of which fuseport's stand-in has no form: leave the "
        f"model {what}",
    )
