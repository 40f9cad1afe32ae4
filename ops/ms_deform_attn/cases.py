"""The cases of deformable attention: sizes and places of levels, channels, memory layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import Layout, expanded_first, heads_first, sliced
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    h: int = 2
    c: int = 8
    q: int = 5
    P: int = 2
    levels: tuple[tuple[int, int], ...] = ((3, 4), (2, 1))
    starts: tuple[int, ...] | None = None  # one after another, if None
    s: int | None = None
    reach: float = 1.4  # of locations, around the middle of the map
    wide_points: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        b, h, c, q, P = self.b, self.h, self.c, self.q, self.P
        count = len(self.levels)
        shapes = torch.tensor(self.levels, dtype=torch.int64).reshape(count, 2)
        ends = shapes.prod(1).cumsum(0)
        starts = ends - shapes.prod(1)
        if self.starts is not None:
            starts = torch.tensor(self.starts)
        s = int(shapes.prod(1).sum()) if self.s is None else self.s
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_points = wide if self.wide_points else dtype
        value = torch.randn(b, s, h, c, generator=generator, dtype=torch.float64)
        uniform = torch.rand(b, q, h, count, P, 2, generator=generator, dtype=torch.float64)
        scores = torch.randn(b, q, h, count * P, generator=generator, dtype=torch.float64)
        weights = scores.softmax(-1).reshape(b, q, h, count, P)
        values = {
            "value": value.to(dtype),
            "value_spatial_shapes": shapes,
            "value_level_start_index": starts,
            "sampling_locations": (0.5 + (uniform - 0.5) * self.reach).to(of_points),
            "attention_weights": weights.to(of_points),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return dict(values)


# `fuseport ops check` makes levels square at times: value has room for that.
_POINTS = ("sampling_locations", "attention_weights")
_SHAPES = {
    "plain": _Shape(),
    "one_of_everything": _Shape(b=1, h=1, c=1, q=1, P=1, levels=((1, 1),)),
    "one_level": _Shape(levels=((5, 3),), P=4, s=25),
    "four_levels": _Shape(levels=((5, 6), (3, 3), (2, 2), (1, 1)), P=4, c=32, b=1),
    "channels_3": _Shape(c=3),
    "channels_17": _Shape(c=17, h=1),
    "channels_70": _Shape(c=70, h=1, q=3),
    "one_row": _Shape(levels=((1, 9), (9, 1)), P=3, s=81),
    "all_within": _Shape(reach=0.5),
    "far_outside": _Shape(reach=1e12, q=9),
    "gaps": _Shape(levels=((2, 3), (2, 2)), starts=(7, 1), s=20),
    "overlapping_levels": _Shape(levels=((3, 4), (4, 3)), starts=(0, 2), s=20),
    "empty_level": _Shape(levels=((2, 3), (0, 4), (3, 0)), P=3, s=9),
    "no_positions": _Shape(levels=((0, 4),)),
    "no_levels": _Shape(levels=(), s=3),
    "no_queries": _Shape(q=0),
    "no_channels": _Shape(c=0),
    "empty_batch": _Shape(b=0),
    "query_blocks": _Shape(b=1, q=131, c=4, P=1),
    # Worth some threads, and more samples than one block of a GPU sorts.
    "many_units": _Shape(q=130, h=3, c=33, P=8, levels=((13, 17), (5, 7))),
    "wide_points": _Shape(wide_points=True, c=20),
    "layout_sliced": _Shape(
        layouts=dict.fromkeys(("value", "value_spatial_shapes", *_POINTS), sliced)
    ),
    "layout_heads_first": _Shape(layouts=dict.fromkeys(("value", *_POINTS), heads_first)),
    "layout_expanded_batch": _Shape(layouts=dict.fromkeys(("value", *_POINTS), expanded_first)),
}

CASES: tuple[Case, ...] = tuple(
    Case(name, "ms_deform_attn", shape.make) for name, shape in _SHAPES.items()
)

_MAPS = ((80, 80), (40, 40), (20, 20), (10, 10))
BENCH: tuple[Case, ...] = tuple(
    Case(f"{name}, four levels", "ms_deform_attn", _Shape(1, 8, 32, q, 4, _MAPS, reach=1.1).make)
    for name, q in (("300 queries", 300), ("8500 queries", 8500))
)

BUGS: tuple[PlantedBug, ...] = tuple(
    PlantedBug(
        "x and y swapped",
        "places are read as (y, x)",
        operator,
        reads({"sampling_locations": lambda given: given["sampling_locations"].flip(-1)}),
    )
    for operator in ("ms_deform_attn", "ms_deform_attn_backward")
)
