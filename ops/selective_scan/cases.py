"""The cases of the selective scan: shapes, ranks and groups of B and C, options, memory layouts.

All but the layouts keep sizes small; lengths sit around the edges of chunks, where kernels err.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fuseport.ops.bugs import groups_in_turn, silu_underived, softplus_underived
from fuseport.ops.case_layouts import (
    Layout,
    expanded_first,
    expanded_last,
    offset_channels,
    sliced,
    transposed,
    transposed_split,
)
from fuseport.ops.selective_scan.shapes import CHUNK
from fuseport.ops.spec import Case, Inputs, Outputs, PlantedBug, Run

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    d: int = 6
    l: int = 9  # noqa: E741
    N: int = 4
    B_groups: int | None = 1  # None: one B per channel, the same at all steps; 0: (b, N, l)
    C_groups: int | None = 1
    skip: bool = True
    gated: bool = False
    bias: bool = True
    softplus: bool = True
    before_softplus: float = -1.0
    complex: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def coefficient(groups: int | None) -> Tensor:
            if groups is not None:
                steps = 2 * self.l if self.complex else self.l
                return normal(self.b, *((groups,) if groups else ()), self.N, steps).to(dtype)
            if self.complex:
                return torch.complex(normal(self.d, self.N), normal(self.d, self.N)).to(A.dtype)
            return normal(self.d, self.N).to(dtype)

        b, d, l = self.b, self.d, self.l  # noqa: E741
        # Softplus of normal numbers around -1, or uniform ones, are steps as trained models have.
        delta = normal(b, d, l)
        delta = delta + self.before_softplus if self.softplus else delta.abs() * 0.3
        u, A = normal(b, d, l).to(dtype), -normal(d, self.N).mul(0.5).exp().to(wide)
        if self.complex:
            A = torch.complex(A, normal(d, self.N).to(wide))
        values = {
            "u": u,
            "delta": delta.to(dtype),
            "A": A,
            "B": coefficient(self.B_groups),
            "C": coefficient(self.C_groups),
            "D": (normal(d) if self.skip else torch.zeros(d)).to(wide),
            "z": normal(b, d, l).to(dtype),
            "delta_bias": (normal(d) * 0.2 if self.bias else torch.zeros(d)).to(wide),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        if not self.gated:
            del values["z"]
        return {**values, "delta_softplus": self.softplus}


_SHAPES = {
    "plain": _Shape(),
    "gated": _Shape(gated=True),
    "bare": _Shape(skip=False, bias=False, softplus=False),
    "gated_without_softplus": _Shape(gated=True, softplus=False),
    # Steps near 1e-5, of which log(1 + exp(x)) would lose all but a few digits.
    "small_steps": _Shape(before_softplus=-11.0, skip=False),
    "small_steps_gated": _Shape(before_softplus=-11.0, skip=False, gated=True),
    "one_of_everything": _Shape(b=1, d=1, l=1, N=1, gated=True),
    "length_1": _Shape(l=1, gated=True),
    "no_steps": _Shape(l=0, gated=True),
    "empty_batch": _Shape(b=0),
    "chunk_minus_1": _Shape(l=CHUNK - 1, d=3),
    "chunk": _Shape(l=CHUNK, d=3, gated=True),
    "chunk_plus_1": _Shape(l=CHUNK + 1, d=3, gated=True),
    "chunks_3_minus_1": _Shape(l=3 * CHUNK - 1, d=3, N=3, gated=True),
    "channels_37": _Shape(b=1, d=37, l=70, N=5, gated=True),
    "channels_130": _Shape(b=2, d=130, l=11, N=16, gated=True),
    # Long enough for tables of decays; in two spans, with steps and channels that fill no vector.
    "long": _Shape(b=1, d=18, l=1100, N=16, gated=True),
    "long_bare": _Shape(b=2, d=2, l=651, N=16, skip=False, bias=False, softplus=False),
    "many_units": _Shape(d=96, l=300, N=16, B_groups=2, gated=True),  # worth several threads
    "states_1": _Shape(N=1),
    "states_19": _Shape(N=19, d=2),
    "3d_coefficients": _Shape(B_groups=0, C_groups=0, gated=True),
    "2d_B": _Shape(B_groups=None, gated=True),
    "2d_C": _Shape(C_groups=None, l=67),
    "2d_coefficients": _Shape(B_groups=None, C_groups=None, gated=True, l=67),
    "groups": _Shape(B_groups=3, C_groups=3, gated=True),
    "groups_differ": _Shape(d=12, B_groups=2, C_groups=3, l=66, gated=True),
    "groups_mixed_ranks": _Shape(B_groups=6, C_groups=0),
    "complex": _Shape(complex=True, l=CHUNK + 1, d=3),
    "complex_gated": _Shape(complex=True, gated=True),
    "complex_bare": _Shape(complex=True, skip=False, bias=False, softplus=False),
    "complex_one_of_everything": _Shape(complex=True, b=1, d=1, l=1, N=1, gated=True),
    "complex_no_steps": _Shape(complex=True, l=0, B_groups=0, gated=True),
    "complex_chunks_3_minus_1": _Shape(complex=True, l=3 * CHUNK - 1, d=3, N=3, gated=True),
    "complex_channels_37": _Shape(complex=True, b=1, d=37, l=70, N=5, C_groups=0, gated=True),
    "complex_2d_B": _Shape(complex=True, B_groups=None, gated=True),
    "complex_2d_C": _Shape(complex=True, B_groups=0, C_groups=None, l=67),
    "complex_2d_coefficients": _Shape(complex=True, B_groups=None, C_groups=None, gated=True),
    "complex_groups_differ": _Shape(complex=True, d=12, l=66, B_groups=2, C_groups=3, gated=True),
    "complex_many_units": _Shape(complex=True, d=96, l=300, N=8, B_groups=2, gated=True),
}

_EVERYTHING = ("u", "delta", "A", "B", "C", "z")
_LAYOUTS: dict[str, Mapping[str, Layout]] = {
    "channels_last": dict.fromkeys(_EVERYTHING, transposed),
    "channels_last_u": {"u": transposed},
    "channels_last_delta_z": {"delta": transposed, "z": transposed},
    "split_projection": dict.fromkeys(("u", "z"), transposed_split),
    "sliced": {**dict.fromkeys(_EVERYTHING, sliced), "D": sliced, "delta_bias": sliced},
    "offset": dict.fromkeys(_EVERYTHING, offset_channels),
    "expanded_batch": dict.fromkeys(("u", "delta", "B", "C", "z"), expanded_first),
    "expanded_time": dict.fromkeys(("u", "delta", "B", "C", "z"), expanded_last),
}


def _case(name: str, shape: _Shape) -> Case:
    operator = "selective_scan_gated" if shape.gated else "selective_scan"
    return Case(name, operator, shape.make, lowers=not shape.complex)


CASES: tuple[Case, ...] = (
    *(_case(name, shape) for name, shape in _SHAPES.items()),
    *(
        _case(f"layout_{name}", replace(_Shape(d=18, l=67, gated=True), layouts=layouts))
        for name, layouts in _LAYOUTS.items()
    ),
    *(
        _case(
            f"complex_layout_{name}",
            replace(
                _Shape(d=18, l=67, complex=True, gated=True, B_groups=B_groups),
                layouts=_LAYOUTS[name],
            ),
        )
        for name, B_groups in (("channels_last", 1), ("sliced", None), ("expanded_time", 1))
    ),
    # The strides of a dimension of size 1 say nothing, and must mislead nobody.
    _case(
        "layout_channels_last_length_1",
        _Shape(l=1, gated=True, layouts=dict.fromkeys(_EVERYTHING, transposed)),
    ),
    _case(
        "layout_channels_last_channel_1",
        _Shape(d=1, gated=True, layouts=dict.fromkeys(("u", "delta", "z"), transposed)),
    ),
)

_TYPICAL = _Shape(b=1, d=1536, l=1024, N=16, gated=True)

BENCH: tuple[Case, ...] = (
    _case("of a 130M model, channels first", _TYPICAL),
    _case(
        "of a 130M model, channels last",
        replace(_TYPICAL, layouts=dict.fromkeys((*_EVERYTHING[:2], "z"), transposed)),
    ),
)


def _scanned(carry: torch.dtype | None, read: torch.dtype | None) -> Callable[..., Outputs]:
    """The scan with its state rounded at each step, or where C reads it."""

    def rounded(state: Tensor, dtype: torch.dtype | None) -> Tensor:
        return state if dtype is None else state.to(dtype).to(state.dtype)

    def run(right: Run, given: Inputs) -> Outputs:
        found = right(given)
        A, B, C = given["A"], given["B"], given["C"]
        if A.is_complex() or B.dim() != 4 or C.dim() != 4 or not given["u"].shape[-1]:
            return found
        u = given["u"].to(A.dtype)
        step = given["delta"].to(A.dtype) + given["delta_bias"][:, None]
        if given["delta_softplus"]:
            step = torch.nn.functional.softplus(step, threshold=20.0)
        d = u.shape[1]
        B, C = (t.to(A.dtype).repeat_interleave(d // t.shape[1], 1) for t in (B, C))
        state, ys = torch.zeros_like(found["last_state"]), []
        for t in range(u.shape[-1]):
            inflow = (step[..., t] * u[..., t])[..., None] * B[..., t]
            state = rounded(torch.exp(step[..., t, None] * A) * state + inflow, carry)
            ys.append((rounded(state, read) * C[..., t]).sum(-1))
        out = torch.stack(ys, -1) + given["D"][:, None] * u
        return {**found, "out": found["out"].clone().copy_(out), "last_state": state}

    return run


_BACKWARDS = ("selective_scan_backward", "selective_scan_gated_backward")

BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "state kept in half",
        "the state is bfloat16 from step to step",
        "selective_scan",
        _scanned(torch.bfloat16, None),
    ),
    PlantedBug(
        "state read in half",
        "the state is rounded to half before it is multiplied by C",
        "selective_scan",
        _scanned(None, torch.bfloat16),
        "transformers, the slow path of Mamba",
    ),
    *(
        PlantedBug(
            "groups in turn",
            "channel i takes group i % G of B and C",
            operator,
            groups_in_turn(("B", "C"), 4, 1, "u", 1),
        )
        for operator in ("selective_scan", "selective_scan_gated")
    ),
    *(
        PlantedBug(
            "softplus's derivative",
            "the backward is without it",
            operator,
            softplus_underived("delta", "delta_bias", 1, "delta_softplus"),
        )
        for operator in _BACKWARDS
    ),
    PlantedBug(
        "SiLU's derivative",
        "the backward takes the sigmoid for the gate's derivative",
        "selective_scan_gated_backward",
        silu_underived("z"),
    ),
)
