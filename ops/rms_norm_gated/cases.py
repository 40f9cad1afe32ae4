"""The cases of a gated norm: those of the plain norm, in both orders of norm and gate."""

from dataclasses import replace

from fuseport.ops.bugs import silu_underived
from fuseport.ops.case_layouts import transposed
from fuseport.ops.rms_norm.cases import LAYOUTS, SHAPES, NormShape, split_projection
from fuseport.ops.spec import Case, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]

_LAYOUTS = {
    **LAYOUTS,
    "channels_first_z": NormShape((3, 17, 19), layouts={"z": transposed}),
    "split_projection_z": NormShape((2, 5, 40), layouts={"z": split_projection}),
}
_SHAPES = {**SHAPES, **{f"layout_{name}": shape for name, shape in _LAYOUTS.items()}}

CASES: tuple[Case, ...] = tuple(
    Case(f"{name}{order}", "rms_norm_gated", replace(shape, norm_before_gate=before).make)
    for order, before in (("", True), ("_gate_before_norm", False))
    for name, shape in _SHAPES.items()
)

BENCH: tuple[Case, ...] = (
    Case("width_1536", "rms_norm_gated", NormShape((1, 1024, 1536), norm_before_gate=False).make),
    Case(
        "width_4096_in_groups",
        "rms_norm_gated",
        NormShape((4, 512, 4096), group_size=512, norm_before_gate=False).make,
    ),
)

BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "gate's derivative",
        "the gate gets no gradient through the norm's order: SiLU's derivative is the sigmoid",
        "rms_norm_gated_backward",
        silu_underived("z"),
    ),
)
