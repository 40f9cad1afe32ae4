"""The cases of a decoding step: widths, states wider than the filter, options, memory layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import expanded_first, sliced, transposed
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    d: int = 6
    l: int = 1  # noqa: E741
    W: int = 4
    slots: int = 3
    silu: bool = True
    seqlens: tuple[int, ...] = ()  # of a circular state, in turn
    wide_weight: bool = False
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, d = self.b, self.d
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_weight = wide if self.wide_weight else dtype
        values = {
            "x": normal(b, d, self.l).to(dtype),
            "conv_state": normal(b, d, self.slots).to(dtype),
        }
        if self.seqlens:
            seqlens = torch.tensor(self.seqlens, dtype=torch.int32)
            values["cache_seqlens"] = seqlens.repeat(b)[:b]
        values["weight"] = normal(d, self.W).to(of_weight)
        values["bias"] = normal(d).to(of_weight)
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {**values, "silu": self.silu}


_LAYOUTS = dict.fromkeys(("x", "conv_state"), transposed)
_SHAPES = {
    "plain": _Shape(),
    "without_silu": _Shape(silu=False),
    "slots_4": _Shape(slots=4),  # as Mamba modules have it
    "slots_9": _Shape(slots=9, l=2),
    "length_3": _Shape(l=3),
    "length_beyond_slots": _Shape(l=11, slots=5),
    "no_steps": _Shape(l=0),
    "empty_batch": _Shape(b=0),
    "no_channels": _Shape(d=0),
    "width_1": _Shape(W=1, slots=0),
    "width_2": _Shape(W=2, slots=1),
    "width_7": _Shape(W=7, slots=6, l=2),
    "channels_130": _Shape(d=130),
    "many_units": _Shape(b=40, d=300, l=3),  # worth several threads
    "wide_weight": _Shape(wide_weight=True, d=37),
    "circular": _Shape(seqlens=(5, 0)),
    "circular_slots_8": _Shape(seqlens=(7, 1002, 0), b=3, slots=8, l=3),
    "circular_length_beyond_slots": _Shape(seqlens=(2, 3), l=11, slots=4),
    "circular_negative": _Shape(seqlens=(-1, -9), slots=5, l=2),
    "circular_width_1": _Shape(seqlens=(5, 0), W=1, slots=1),
    "circular_no_steps": _Shape(seqlens=(5, 0), l=0),
    "circular_many_channels": _Shape(seqlens=(6, 3), d=200, slots=4, silu=False),
    "layout_channels_last": _Shape(layouts=_LAYOUTS, d=37, l=3, slots=4),
    "layout_sliced": _Shape(
        layouts=dict.fromkeys(("x", "conv_state", "weight", "bias"), sliced), l=3
    ),
    "layout_expanded": _Shape(layouts=dict.fromkeys(("x", "conv_state"), expanded_first), l=2),
    "layout_circular": _Shape(layouts=_LAYOUTS | {"cache_seqlens": sliced}, seqlens=(3, 8), l=3),
}

CASES: tuple[Case, ...] = tuple(
    Case(
        name,
        "causal_conv1d_update_circular" if shape.seqlens else "causal_conv1d_update",
        shape.make,
    )
    for name, shape in _SHAPES.items()
)

BENCH: tuple[Case, ...] = (
    Case("width_1536", "causal_conv1d_update", _Shape(b=1, d=1536).make),
    Case("width_1536_batch_64", "causal_conv1d_update", _Shape(b=64, d=1536).make),
)

BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "state one step off",
        "a state that is wider than the filter is read from its other end",
        "causal_conv1d_update",
        reads({"conv_state": lambda given: given["conv_state"].roll(1, -1)}),
        "Mamba modules keep a state of width W, the kernel one of W - 1",
    ),
    PlantedBug(
        "buffer not circular",
        "the place in the buffer is not counted from its beginning",
        "causal_conv1d_update_circular",
        reads({"cache_seqlens": lambda given: torch.zeros_like(given["cache_seqlens"])}),
    ),
)
