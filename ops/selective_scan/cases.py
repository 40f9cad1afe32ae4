"""The cases of the selective scan: shapes, ranks and groups of B and C, options, memory layouts.

All but the layouts keep sizes small; lengths sit around the edges of chunks, where kernels err.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fuseport.ops.selective_scan.shapes import CHUNK
from fuseport.ops.spec import Case, Inputs

__all__ = ["BENCH", "CASES"]

Layout = Callable[[Tensor], Tensor]
"""Copies a tensor into some memory layout; the values stay."""


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
        delta = normal(b, d, l) - 1 if self.softplus else normal(b, d, l).abs() * 0.3
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


def channels_last(t: Tensor) -> Tensor:
    """The first and the last dimension trade places in memory with what lies between."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced(t: Tensor) -> Tensor:
    """Every second element of the last dimension of a larger buffer."""
    buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), float("nan"))
    view = buffer[..., 1::2]
    return view.copy_(t)


def offset(t: Tensor) -> Tensor:
    """Rows that end before the buffer's do, after an odd offset: channels of a split projection."""
    buffer = t.new_full((t.shape[0], 2 * t.shape[1] + 1, *t.shape[2:]), float("nan"))
    return buffer[:, t.shape[1] : 2 * t.shape[1]].copy_(t)


def expanded_batch(t: Tensor) -> Tensor:
    """The first batch entry for all: stride 0."""
    return t[:1].expand(t.shape)


def expanded_time(t: Tensor) -> Tensor:
    """The first step for all: stride 0."""
    return t[..., :1].expand(t.shape)


def transposed_split(t: Tensor) -> Tensor:
    """Channels last inside a wider (b, l, 2d) projection, as `x, z = in_proj(h).chunk(2)` gives."""
    wide = t.new_full((t.shape[0], t.shape[2], 2 * t.shape[1]), float("nan")).transpose(1, 2)
    return wide[:, t.shape[1] :].copy_(t)


_SHAPES = {
    "plain": _Shape(),
    "gated": _Shape(gated=True),
    "bare": _Shape(skip=False, bias=False, softplus=False),
    "gated_without_softplus": _Shape(gated=True, softplus=False),
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
    "channels_last": dict.fromkeys(_EVERYTHING, channels_last),
    "channels_last_u": {"u": channels_last},
    "channels_last_delta_z": {"delta": channels_last, "z": channels_last},
    "split_projection": dict.fromkeys(("u", "z"), transposed_split),
    "sliced": {**dict.fromkeys(_EVERYTHING, sliced), "D": sliced, "delta_bias": sliced},
    "offset": dict.fromkeys(_EVERYTHING, offset),
    "expanded_batch": dict.fromkeys(("u", "delta", "B", "C", "z"), expanded_batch),
    "expanded_time": dict.fromkeys(("u", "delta", "B", "C", "z"), expanded_time),
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
        _Shape(l=1, gated=True, layouts=dict.fromkeys(_EVERYTHING, channels_last)),
    ),
    _case(
        "layout_channels_last_channel_1",
        _Shape(d=1, gated=True, layouts=dict.fromkeys(("u", "delta", "z"), channels_last)),
    ),
)

_TYPICAL = _Shape(b=1, d=1536, l=1024, N=16, gated=True)

BENCH: tuple[Case, ...] = (
    _case("of a 130M model, channels first", _TYPICAL),
    _case(
        "of a 130M model, channels last",
        replace(_TYPICAL, layouts=dict.fromkeys((*_EVERYTHING[:2], "z"), channels_last)),
    ),
)
