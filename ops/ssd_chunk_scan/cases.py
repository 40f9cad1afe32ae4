"""The cases of the chunked scan: shapes around edges of chunks and vectors, options, layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.spec import Case, Inputs
from fuseport.ops.ssd_chunk_scan.shapes import CHUNK

__all__ = ["CASES"]

Layout = Callable[[Tensor], Tensor]
"""Copies a tensor into some memory layout; the values stay, unless it is expanded."""


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    l: int = 9  # noqa: E741
    H: int = 3
    P: int = 5
    N: int = 6
    G: int = 1
    gated: bool = False
    softplus: bool = True
    initial: bool = True
    limit: tuple[float, float] = (0.0, float("inf"))
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, l, H, P, N = self.b, self.l, self.H, self.P, self.N  # noqa: E741
        dt = normal(b, l, H) - 1 if self.softplus else normal(b, l, H).abs() * 0.3
        initial = normal(b, H, P, N) if self.initial else torch.zeros(b, H, P, N)
        values = {
            "x": normal(b, l, H, P).to(dtype),
            "dt": dt.to(dtype),
            "A": -normal(H).mul(0.5).exp().to(wide),
            "B": normal(b, l, self.G, N).to(dtype),
            "C": normal(b, l, self.G, N).to(dtype),
            "D": normal(H, P).to(wide),
            "z": normal(b, l, H, P).to(dtype),
            "dt_bias": (normal(H) * 0.2).to(wide),
            "initial_states": initial.to(wide),
            "dt_limit": torch.tensor(self.limit, dtype=wide),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        if not self.gated:
            del values["z"]
        return {**values, "dt_softplus": self.softplus}


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions trade places in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def time_last(t: Tensor) -> Tensor:
    """Time comes last in memory, as after a convolution over (b, channels, l)."""
    moved: Tensor = t.movedim(1, -1).contiguous().movedim(-1, 1)
    return moved


def sliced(t: Tensor) -> Tensor:
    """Every second element of the last dimension of a larger buffer, after an odd offset."""
    buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), float("nan"))
    return buffer[..., 1::2].copy_(t)


def offset(t: Tensor) -> Tensor:
    """A part of wider steps: one of the outputs of a split projection."""
    buffer = t.new_full((*t.shape[:2], 2 * t[0, 0].numel() + 1), float("nan"))
    view: Tensor = buffer[..., t[0, 0].numel() : 2 * t[0, 0].numel()].unflatten(2, t.shape[2:])
    return view.copy_(t)


def expanded_batch(t: Tensor) -> Tensor:
    """The first batch entry for all: stride 0."""
    return t[:1].expand(t.shape)


def expanded_time(t: Tensor) -> Tensor:
    """The first step for all: stride 0."""
    return t[:, :1].expand(t.shape)


def expanded_width(t: Tensor) -> Tensor:
    """The first of the last dimension for all: D of one number for a head."""
    return t[..., :1].expand(t.shape)


_SEQUENCES = ("x", "dt", "B", "C", "z")
_SHAPES = {
    "plain": _Shape(),
    "gated": _Shape(gated=True),
    "without_softplus": _Shape(gated=True, softplus=False, initial=False),
    "limited": _Shape(l=40, limit=(0.2, 0.5)),
    "one_of_everything": _Shape(b=1, l=1, H=1, P=1, N=1, gated=True),
    "length_1": _Shape(l=1, gated=True),
    "no_steps": _Shape(l=0, gated=True),
    "empty_batch": _Shape(b=0),
    "chunk_minus_1": _Shape(l=CHUNK - 1, gated=True),
    "chunk": _Shape(l=CHUNK),
    "chunk_plus_1": _Shape(l=CHUNK + 1, gated=True),
    "chunks_3_minus_1": _Shape(l=3 * CHUNK - 1, H=2, gated=True),
    "width_17": _Shape(l=70, P=17, N=19, gated=True),
    "width_1": _Shape(l=70, P=1, N=33),
    "width_70": _Shape(b=1, l=66, P=70, N=37, H=2, gated=True),
    "groups": _Shape(l=70, H=6, G=3, gated=True),
    "heads_7": _Shape(l=66, H=7),
    "heads_48": _Shape(b=2, l=10, H=48, P=3, N=3, G=2),
    "mamba_2": _Shape(b=1, l=130, H=4, P=64, N=128, G=2, gated=True),
    "many_units": _Shape(b=2, l=200, H=12, P=16, N=16, G=2, gated=True),  # worth several threads
    "layout_transposed": _Shape(
        l=67, P=18, N=20, gated=True,
        layouts=dict.fromkeys((*_SEQUENCES, "D", "initial_states"), transposed),
    ),
    "layout_time_last": _Shape(
        l=67, P=18, N=20, gated=True, layouts=dict.fromkeys(_SEQUENCES, time_last)
    ),
    "layout_sliced": _Shape(
        l=67, P=18, N=20, gated=True,
        layouts=dict.fromkeys((*_SEQUENCES, "A", "D", "dt_bias", "initial_states"), sliced),
    ),
    "layout_offset": _Shape(
        l=67, P=18, N=20, gated=True, layouts=dict.fromkeys(("x", "B", "C", "z"), offset)
    ),
    "layout_expanded_batch": _Shape(
        gated=True, layouts=dict.fromkeys((*_SEQUENCES, "initial_states"), expanded_batch)
    ),
    "layout_expanded_time": _Shape(
        gated=True, layouts=dict.fromkeys(_SEQUENCES, expanded_time) | {"D": expanded_width}
    ),
    "layout_transposed_length_1": _Shape(
        l=1, H=1, gated=True, layouts=dict.fromkeys(_SEQUENCES, time_last)
    ),
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(
    Case(name, "ssd_chunk_scan_gated" if shape.gated else "ssd_chunk_scan", shape.make)
    for name, shape in _SHAPES.items()
)
