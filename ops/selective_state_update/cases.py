"""The cases of the state update: heads and groups, sizes around vectors, memory layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import groups_in_turn, returns
from fuseport.ops.case_layouts import (
    Layout,
    expanded_first,
    expanded_last,
    offset_last,
    sliced,
    transposed,
)
from fuseport.ops.spec import Case, Inputs, Outputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    h: int = 3
    d: int = 5
    N: int = 6
    g: int = 1
    gated: bool = False
    softplus: bool = True
    before_softplus: float = -1.0
    first: bool = False  # the first step, from a state of zeros, without D
    wide_state: bool = True
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, h, d, N = self.b, self.h, self.d, self.N
        dt = normal(b, h, d)
        dt = dt + self.before_softplus if self.softplus else dt.abs() * 0.3
        known = 0.0 if self.first else 1.0
        values = {
            "state": (normal(b, h, d, N) * known).to(wide if self.wide_state else dtype),
            "x": normal(b, h, d).to(dtype),
            "dt": dt.to(dtype),
            "A": -normal(h, d, N).mul(0.5).exp().to(wide),
            "B": normal(b, self.g, N).to(dtype),
            "C": normal(b, self.g, N).to(dtype),
            "D": (normal(h, d) * known).to(wide),
            "z": normal(b, h, d).to(dtype),
            "dt_bias": (normal(h, d) * 0.2).to(wide),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        if not self.gated:
            del values["z"]
        return {**values, "dt_softplus": self.softplus}


def expanded_head(t: Tensor) -> Tensor:
    """The first of the last two dimensions for all: A of Mamba-2, one number for a head."""
    return t[:, :1, :1].expand(t.shape)


_ALL = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
_HEAD = {"dt": expanded_last, "A": expanded_head, "D": expanded_last, "dt_bias": expanded_last}
_SHAPES = {
    "plain": _Shape(),
    "gated": _Shape(gated=True),
    "without_softplus": _Shape(gated=True, softplus=False),
    # Steps near 1e-5, of which log(1 + exp(x)) would lose all but a few digits.
    "small_steps": _Shape(before_softplus=-11.0, first=True),
    "small_steps_gated": _Shape(before_softplus=-11.0, first=True, gated=True),
    "state_of_inputs_dtype": _Shape(gated=True, wide_state=False),
    "one_of_everything": _Shape(b=1, h=1, d=1, N=1, gated=True),
    "empty_batch": _Shape(b=0, gated=True),
    "no_channels": _Shape(d=0),
    "no_states": _Shape(N=0),
    "mamba_1": _Shape(h=1, d=70, N=16, gated=True),
    "mamba_2": _Shape(b=2, h=4, d=64, N=128, g=2, gated=True, layouts=_HEAD),
    "many_units": _Shape(b=4, h=8, d=64, N=64, g=2, gated=True),  # worth several threads
    "states_17": _Shape(N=17, d=33, gated=True),
    "channels_130": _Shape(d=130, N=3),
    "groups": _Shape(h=6, g=3, gated=True),
    "groups_without_gate": _Shape(h=6, g=2),
    "layout_transposed": _Shape(d=18, N=20, gated=True, layouts=dict.fromkeys(_ALL, transposed)),
    "layout_sliced": _Shape(d=18, N=20, gated=True, layouts=dict.fromkeys(_ALL, sliced)),
    "layout_offset": _Shape(d=18, N=20, gated=True, layouts=dict.fromkeys(_ALL, offset_last)),
    "layout_expanded_states": _Shape(d=18, N=20, gated=True, layouts={"A": expanded_last}),
    "layout_expanded_batch": _Shape(
        gated=True, layouts=dict.fromkeys(("state", "x", "dt", "B", "C", "z"), expanded_first)
    ),
    "layout_transposed_size_1": _Shape(
        h=1, d=1, gated=True, layouts=dict.fromkeys(_ALL, transposed)
    ),
}

CASES: tuple[Case, ...] = tuple(
    Case(
        name,
        "selective_state_update_gated" if shape.gated else "selective_state_update",
        shape.make,
    )
    for name, shape in _SHAPES.items()
)

BENCH: tuple[Case, ...] = (
    Case(
        "mamba_1", "selective_state_update_gated", _Shape(b=1, h=1, d=1536, N=16, gated=True).make
    ),
    Case(
        "mamba_1_batch_64",
        "selective_state_update_gated",
        _Shape(b=64, h=1, d=1536, N=16, gated=True).make,
    ),
)


def _read_in_half(given: Inputs, found: Outputs) -> Tensor:
    """C read through a state that was rounded to bfloat16."""
    heads, wide = given["x"].shape[1], given["A"].dtype
    state = found["new_state"].bfloat16().to(wide)
    C = given["C"].to(wide).repeat_interleave(heads // given["C"].shape[1], 1)[:, :, None]
    out: Tensor = (state * C).sum(-1) + given["D"] * given["x"].to(wide)
    return out


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "state read in half",
        "the state is rounded to half before it is multiplied by C",
        "selective_state_update",
        returns({"out": _read_in_half}),
        "transformers, the slow path of Mamba",
    ),
    *(
        PlantedBug(
            "groups in turn",
            "head i takes group i % G of B and C",
            operator,
            groups_in_turn(("B", "C"), 3, 1, "x", 1),
        )
        for operator in ("selective_state_update", "selective_state_update_gated")
    ),
)
