"""The cases of a gated norm: those of the plain norm, in both orders of norm and gate."""

from dataclasses import replace

from fuseport.ops.rms_norm.cases import LAYOUTS, SHAPES, NormShape, channels_first, split_projection
from fuseport.ops.spec import Case

__all__ = ["CASES"]

_LAYOUTS = {
    **LAYOUTS,
    "channels_first_z": NormShape((3, 17, 19), layouts={"z": channels_first}),
    "split_projection_z": NormShape((2, 5, 40), layouts={"z": split_projection}),
}
_SHAPES = {**SHAPES, **{f"layout_{name}": shape for name, shape in _LAYOUTS.items()}}

CASES: tuple[Case, ...] = tuple(
    Case(f"{name}{order}", "rms_norm_gated", replace(shape, norm_before_gate=before).make)
    for order, before in (("", True), ("_gate_before_norm", False))
    for name, shape in _SHAPES.items()
)
