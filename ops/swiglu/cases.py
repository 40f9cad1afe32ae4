"""The cases of SwiGLU: sizes around those of vectors and units, both forms, memory layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import reads, silu_underived
from fuseport.ops.case_layouts import expanded_first, sliced, transposed
from fuseport.ops.rms_norm.cases import reordered
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...] = (2, 3, 20)
    scale: float = 2.0
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Two tensors, drawn in float64 and then rounded, so that all dtypes see the same."""
        generator = torch.Generator().manual_seed(seed)
        values: Inputs = {}
        for name, scale in (("gate", self.scale), ("up", 1.0)):
            drawn = torch.randn(self.shape, generator=generator, dtype=torch.float64)
            values[name] = self.layouts.get(name, _as_it_is)((scale * drawn).to(dtype))
        return values

    def packed(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Them as halves of one tensor's rows."""
        x = torch.cat(tuple(self.make(dtype, seed).values()), -1)
        return {"x": self.layouts.get("x", _as_it_is)(x)}


def _as_it_is(t: Tensor) -> Tensor:
    return t


def _chunk(t: Tensor) -> Tensor:
    """The first half of the rows of a wider projection."""
    return torch.cat([t, torch.full_like(t, float("nan"))], -1)[..., : t.shape[-1]]


_BOTH = ("gate", "up")
_SHAPES = {
    "plain": _Shape(),
    "one_of_everything": _Shape((1,)),
    "channels_1": _Shape((5, 1)),
    "channels_17": _Shape((3, 17)),
    "channels_33": _Shape((2, 2, 33)),
    "no_rows": _Shape((0, 4)),
    "no_channels": _Shape((3, 0)),
    "many_units": _Shape((3, 50, 261)),
    "long_rows": _Shape((2, 8300)),
    "wide_range": _Shape((4, 40), scale=40.0),
}
_LAYOUTS = {
    "layout_chunks": _Shape((3, 5, 21), layouts=dict.fromkeys(_BOTH, _chunk)),
    "layout_chunk_of_gate": _Shape((3, 5, 21), layouts={"gate": _chunk}),
    "layout_channels_first": _Shape((3, 5, 9), layouts=dict.fromkeys(_BOTH, transposed)),
    "layout_reordered": _Shape((3, 5, 2, 9), layouts=dict.fromkeys(_BOTH, reordered)),
    "layout_sliced": _Shape((3, 9), layouts=dict.fromkeys(_BOTH, sliced)),
    "layout_expanded": _Shape((3, 9), layouts={"up": expanded_first}),
}
_PACKED = {
    "packed_channels_first": _Shape((3, 5, 9), layouts={"x": transposed}),
    "packed_chunk": _Shape((3, 5, 9), layouts={"x": _chunk}),
    "packed_expanded": _Shape((3, 5, 9), layouts={"x": expanded_first}),
}

CASES: tuple[Case, ...] = (
    *(Case(name, "swiglu", shape.make) for name, shape in {**_SHAPES, **_LAYOUTS}.items()),
    *(Case(f"packed_{name}", "swiglu_packed", shape.packed) for name, shape in _SHAPES.items()),
    *(Case(name, "swiglu_packed", shape.packed) for name, shape in _PACKED.items()),
)

BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "SiLU's derivative",
        "the backward takes the sigmoid for the derivative of SiLU",
        "swiglu_backward",
        silu_underived("gate"),
        "entrenar: its SwiGLU backward ignores SiLU's derivative",
    ),
    PlantedBug(
        "halves swapped",
        "the second half of the rows is taken for the gate",
        "swiglu_packed",
        reads({"x": lambda given: given["x"].roll(given["x"].shape[-1] // 2, -1)}),
    ),
)
