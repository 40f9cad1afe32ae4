"""The cases of the causal convolution: shapes, widths, options, memory layouts.

Lengths sit around the width and the edges of the kernels' chunks, where kernels err.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import (
    Layout,
    expanded_first,
    expanded_last,
    offset_channels,
    sliced,
    transposed,
    transposed_split,
)
from fuseport.ops.spec import Case, Inputs, Outputs, PlantedBug, Run

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    d: int = 6
    l: int = 11  # noqa: E741
    W: int = 4
    bias: bool = True
    silu: bool = True
    packed: tuple[int, ...] = ()  # sequence indices, each of which stands for three steps
    wide_weight: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, d, l, W = self.b, self.d, self.l, self.W  # noqa: E741
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_weight = wide if self.wide_weight else dtype
        values = {
            "x": normal(b, d, l).to(dtype),
            "weight": normal(d, W).to(of_weight),
            "bias": (normal(d) if self.bias else torch.zeros(d)).to(of_weight),
        }
        if self.packed:
            indices = torch.tensor(self.packed, dtype=torch.int32).repeat_interleave(3)
            shifted = [indices.roll(i).repeat(l // len(indices) + 1)[:l] for i in range(b)]
            values["seq_idx"] = torch.stack(shifted)
        else:
            values["initial_states"] = normal(b, d, W - 1).to(dtype)
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {**values, "silu": self.silu}


_LAST = {"x": transposed}
_PACKED = (0, 0, 1, 2, -1, 5, 0)
_SHAPES = {
    "plain": _Shape(),
    "without_silu": _Shape(silu=False),
    "without_bias": _Shape(bias=False),
    "one_of_everything": _Shape(b=1, d=1, l=1, W=1),
    "width_1": _Shape(W=1),
    "width_2": _Shape(W=2, layouts=_LAST),
    "width_3": _Shape(W=3),
    "width_7": _Shape(W=7, d=3, l=40),
    "width_beyond_length": _Shape(W=9, l=5),
    "width_beyond_chunk": _Shape(W=40, d=3, l=75, layouts=_LAST),
    "length_1": _Shape(l=1),
    "length_2": _Shape(l=2, layouts=_LAST),
    "length_3": _Shape(l=3),
    "no_steps": _Shape(l=0),
    "empty_batch": _Shape(b=0),
    "no_channels": _Shape(d=0),
    "chunk_minus_1": _Shape(b=1, d=3, l=511),
    "chunk": _Shape(b=1, d=3, l=512),
    "chunk_plus_1": _Shape(b=1, d=3, l=513),
    "chunks_3": _Shape(b=1, d=2, l=1030, W=3),
    "channels_37": _Shape(b=1, d=37, l=70),
    "channels_130": _Shape(d=130, l=9),
    "many_units": _Shape(d=96, l=700),  # worth several threads
    "wide_weight": _Shape(wide_weight=True, d=19, l=37),
    "last_plain": _Shape(layouts=_LAST),
    "last_without_silu": _Shape(layouts=_LAST, silu=False, bias=False),
    "last_chunk_minus_1": _Shape(d=17, l=31, layouts=_LAST),
    "last_chunk": _Shape(d=16, l=32, layouts=_LAST),
    "last_chunk_plus_1": _Shape(d=15, l=33, layouts=_LAST),
    "last_chunks_3": _Shape(d=70, l=97, layouts=_LAST),
    "last_channels_130": _Shape(d=130, l=9, layouts=_LAST),
    "last_no_steps": _Shape(l=0, layouts=_LAST),
    "last_many_units": _Shape(d=96, l=700, layouts=_LAST),
    "last_wide_weight": _Shape(wide_weight=True, d=19, l=37, layouts=_LAST),
    "packed": _Shape(packed=_PACKED, l=40, d=5),
    "packed_one_sequence": _Shape(packed=(3,)),
    "packed_all_padding": _Shape(packed=(-1,)),
    "packed_width_3": _Shape(packed=_PACKED, W=3, l=40, silu=False),
    "packed_width_9": _Shape(packed=_PACKED, W=9, l=40),
    "packed_length_2": _Shape(packed=_PACKED, l=2),
    "packed_no_steps": _Shape(packed=_PACKED, l=0),
    "packed_chunk_plus_1": _Shape(packed=_PACKED, b=1, d=3, l=513),
    "packed_many_units": _Shape(packed=_PACKED, d=96, l=700),
    "packed_last": _Shape(packed=_PACKED, l=67, d=18, layouts=_LAST),
    "packed_last_width_5": _Shape(packed=_PACKED, W=5, l=67, d=18, layouts=_LAST),
    "packed_wide_weight": _Shape(packed=_PACKED, l=37, wide_weight=True, layouts=_LAST),
}

_LAYOUTS: dict[str, Mapping[str, Layout]] = {
    "split_projection": {"x": transposed_split, "initial_states": transposed},
    "sliced": dict.fromkeys(("x", "weight", "bias", "initial_states"), sliced),
    "offset": {"x": offset_channels, "weight": transposed, "initial_states": offset_channels},
    "expanded_batch": dict.fromkeys(("x", "initial_states"), expanded_first),
    "expanded_time": dict.fromkeys(("x", "initial_states", "weight"), expanded_last),
}


def _case(name: str, shape: _Shape) -> Case:
    operator = "causal_conv1d_packed" if shape.packed else "causal_conv1d"
    return Case(name, operator, shape.make)


CASES: tuple[Case, ...] = (
    *(_case(name, shape) for name, shape in _SHAPES.items()),
    *(
        _case(f"layout_{name}", _Shape(d=18, l=67, layouts=layouts))
        for name, layouts in _LAYOUTS.items()
    ),
    _case(
        "layout_packed_sliced",
        _Shape(packed=_PACKED, d=18, l=67, layouts={"x": sliced, "seq_idx": sliced}),
    ),
    # The strides of a dimension of size 1 say nothing, and must mislead nobody.
    _case("layout_channels_last_length_1", _Shape(l=1, layouts=_LAST)),
    _case("layout_channels_last_channel_1", _Shape(d=1, layouts=_LAST)),
)

_WIDE = _Shape(b=1, d=1536, l=1024)
BENCH: tuple[Case, ...] = (
    Case("width_1536", "causal_conv1d", _WIDE.make),
    Case(
        "width_1536_channels_last",
        "causal_conv1d",
        replace(_WIDE, layouts={"x": transposed}).make,
    ),
    Case("width_1536_batch_8", "causal_conv1d", replace(_WIDE, b=8).make),
    Case(
        "width_1536_packed",
        "causal_conv1d_packed",
        replace(_WIDE, packed=(0, 0, 1)).make,
    ),
)


def _silu_underived(right: Run, given: Inputs) -> Outputs:
    """Without the activation's derivative the cotangent goes straight into the convolution."""
    return right({**given, "silu": False})


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "not causal",
        "the filter runs backwards: a step reads those after it",
        "causal_conv1d",
        reads({"weight": lambda given: given["weight"].flip(-1)}),
    ),
    PlantedBug(
        "SiLU's derivative",
        "the backward ignores it",
        "causal_conv1d_backward",
        _silu_underived,
    ),
    *(
        PlantedBug(
            "sequences joined",
            "packed sequences read each other's steps",
            operator,
            reads({"seq_idx": lambda given: torch.zeros_like(given["seq_idx"])}),
        )
        for operator in ("causal_conv1d_packed", "causal_conv1d_packed_backward")
    ),
)
