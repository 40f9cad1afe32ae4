"""The cases of a rotary embedding: both pairings, partial ones, angles shared or not, layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import expanded_first, sliced, transposed
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    h: int = 3
    l: int = 5  # noqa: E741
    p: int = 8
    pairs: int = 4
    interleaved: bool = False
    of_batch: bool = False  # each has its own angles
    wide_angles: bool = False
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        angles = 3 * normal(*((self.b,) if self.of_batch else ()), self.l, self.pairs)
        half = dtype in (torch.float16, torch.bfloat16)
        of_angles = torch.float32 if self.wide_angles and half else dtype
        values = {
            "x": normal(self.b, self.h, self.l, self.p).to(dtype),
            "cos": angles.cos().to(of_angles),
            "sin": angles.sin().to(of_angles),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {**values, "interleaved": self.interleaved}


def _heads_last(t: Tensor) -> Tensor:
    """A transposed (b, l, h, p) buffer, as a projection leaves it."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


_SHAPES = {
    "plain": _Shape(),
    "partial": _Shape(p=11),
    "one_of_everything": _Shape(1, 1, 1, 2, 1),
    "no_pairs": _Shape(p=3, pairs=0),
    "of_batch": _Shape(b=3, of_batch=True),
    "wide_angles": _Shape(wide_angles=True, p=10),
    "heads_64": _Shape(1, 2, 9, 64, 32),
    "pairs_33": _Shape(1, 2, 3, 70, 33),
    "many_units": _Shape(2, 8, 40, 64, 32),
    "no_positions": _Shape(l=0),
    "empty_batch": _Shape(b=0),
    "layout_heads_last": _Shape(p=12, layouts={"x": _heads_last}),
    "layout_channels_first": _Shape(
        layouts=dict.fromkeys(("x", "cos", "sin"), transposed), of_batch=True
    ),
    "layout_sliced": _Shape(layouts=dict.fromkeys(("x", "cos", "sin"), sliced)),
    "layout_expanded": _Shape(layouts={"x": expanded_first, "cos": expanded_first}, of_batch=True),
}
_INTERLEAVED = ("plain", "partial", "of_batch", "pairs_33", "layout_heads_last", "layout_sliced")

CASES: tuple[Case, ...] = tuple(
    Case(name, "rotary_embedding", shape.make)
    for name, shape in {
        **_SHAPES,
        **{
            f"interleaved_{name}": replace(_SHAPES[name], interleaved=True) for name in _INTERLEAVED
        },
    }.items()
)

BUGS: tuple[PlantedBug, ...] = tuple(
    PlantedBug(
        "turned back",
        "pairs are turned by the negative angle",
        operator,
        reads({"sin": lambda given: -given["sin"]}),
    )
    for operator in ("rotary_embedding", "rotary_embedding_backward")
)
