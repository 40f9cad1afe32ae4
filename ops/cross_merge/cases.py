"""The cases of a sum of walks: those of the walks."""

from dataclasses import replace

from fuseport.ops.cross_scan.cases import SHAPES
from fuseport.ops.spec import Case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = tuple(
    Case(name, "cross_merge", replace(shape, walks=True).make) for name, shape in SHAPES.items()
)
