"""The cases of the chunked scan: shapes around edges of chunks and vectors, options, layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import groups_in_turn, reads, silu_underived, softplus_underived
from fuseport.ops.case_layouts import (
    Layout,
    expanded_first,
    expanded_last,
    expanded_time,
    sliced,
    time_last,
    transposed,
)
from fuseport.ops.spec import Case, Inputs, PlantedBug
from fuseport.ops.ssd_chunk_scan.shapes import CHUNK

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    l: int = 9  # noqa: E741
    H: int = 3
    P: int = 5
    N: int = 6
    G: int = 1
    gated: bool = False
    discrete: bool = False
    softplus: bool = True
    before_softplus: float = -1.0
    skip: bool = True
    initial: bool = True
    limit: tuple[float, float] = (0.0, float("inf"))
    packed: tuple[tuple[int, int], ...] = (
        (0, 0),
    )  # numbers of sequences, each with its first step
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        kind = "_gated" if self.gated else "_discrete" if self.discrete else ""
        return "ssd_chunk_scan" + kind

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, l, H, P, N = self.b, self.l, self.H, self.P, self.N  # noqa: E741
        dt = normal(b, l, H)
        dt = dt + self.before_softplus if self.softplus else dt.abs() * 0.3
        initial = normal(b, H, P, N) if self.initial else torch.zeros(b, H, P, N)
        values = {
            "x": normal(b, l, H, P).to(dtype),
            "dt": dt.to(dtype),
            "A": -normal(H).mul(0.5).exp().to(wide),
            "B": normal(b, l, self.G, N).to(dtype),
            "C": normal(b, l, self.G, N).to(dtype),
            "D": (normal(H, P) * self.skip).to(wide),
            "z": normal(b, l, H, P).to(dtype),
            "dt_bias": (normal(H) * 0.2).to(wide),
            "initial_states": initial.to(wide),
            "seq_idx": self.sequences(),
            "dt_limit": torch.tensor(self.limit, dtype=wide),
        }
        if self.discrete:
            values["log_decay"] = -normal(b, l, H).exp().mul(0.3).to(wide)
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        if self.discrete:
            order = ("x", "log_decay", "B", "C", "D", "initial_states", "seq_idx")
            return {name: values[name] for name in order}
        if not self.gated:
            del values["z"]
        return {**values, "dt_softplus": self.softplus}

    def sequences(self) -> Tensor:
        """(b, l), those of `packed`, one step later in each batch entry."""
        numbers = torch.zeros(self.b, self.l, dtype=torch.int32)
        for entry in range(self.b):
            for number, start in self.packed:
                numbers[entry, start + entry if start else 0 :] = number
        return numbers


def offset(t: Tensor) -> Tensor:
    """A part of wider steps: one of the outputs of a split projection."""
    buffer = t.new_full((*t.shape[:2], 2 * t[0, 0].numel() + 1), float("nan"))
    view: Tensor = buffer[..., t[0, 0].numel() : 2 * t[0, 0].numel()].unflatten(2, t.shape[2:])
    return view.copy_(t)


def cut_off(t: Tensor) -> Tensor:
    """Some steps forget everything, to the bit or beyond, and others nothing."""
    t = t.clone()
    t[:, 3::17], t[:, 5:7], t[:, 20], t[:, 64:66] = -1e4, -torch.inf, -88.0, -3e38
    t[:, 8:12] = 0
    return t


_SEQUENCES = ("x", "dt", "B", "C", "z")
_DISCRETE = ("x", "log_decay", "B", "C")
_SHAPES = {
    "plain": _Shape(),
    "gated": _Shape(gated=True),
    "without_softplus": _Shape(gated=True, softplus=False, initial=False),
    # Steps near 1e-5, of which log(1 + exp(x)) would lose all but a few digits.
    "small_steps": _Shape(before_softplus=-11.0, skip=False, initial=False),
    "small_steps_gated": _Shape(before_softplus=-11.0, skip=False, initial=False, gated=True),
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
        gated=True, layouts=dict.fromkeys((*_SEQUENCES, "initial_states"), expanded_first)
    ),
    "layout_expanded_time": _Shape(
        gated=True, layouts=dict.fromkeys(_SEQUENCES, expanded_time) | {"D": expanded_last}
    ),
    "packed": _Shape(l=40, packed=((3, 0), (-1, 4), (7, 5), (8, 21)), gated=True),
    "packed_one_sequence": _Shape(packed=((5, 0),)),
    "packed_length_1": _Shape(l=1, packed=((2, 0),), gated=True),
    "packed_all_different": _Shape(l=70, packed=tuple((i, i) for i in range(70)), H=2),
    "packed_at_edges": _Shape(
        b=3, l=3 * CHUNK + 5, P=18, N=20, gated=True,
        packed=((0, 0), (1, CHUNK - 1), (2, 2 * CHUNK - 1), (3, 3 * CHUNK)),
    ),
    "packed_numbers_come_back": _Shape(
        l=2 * CHUNK + 9, H=2, packed=((0, 0), (1, 11), (0, 13), (1, 40), (0, CHUNK), (4, 99))
    ),
    "packed_last_step": _Shape(l=CHUNK, b=1, packed=((1, 0), (0, CHUNK - 1)), gated=True),
    "packed_limited": _Shape(l=66, packed=((0, 0), (1, 30)), initial=False, limit=(0.2, 0.5)),
    "packed_many_units": _Shape(
        l=200, H=12, P=16, N=16, G=2, gated=True, packed=((0, 0), (1, 50), (2, 51), (3, 170))
    ),
    "layout_packed_transposed": _Shape(
        l=67, P=18, N=20, gated=True, packed=((0, 0), (1, 20), (2, 33)),
        layouts=dict.fromkeys((*_SEQUENCES, "D", "initial_states", "seq_idx"), transposed),
    ),
    "layout_packed_sliced": _Shape(
        l=67, packed=((0, 0), (1, 20), (2, 33)), layouts=dict.fromkeys(("x", "seq_idx"), sliced)
    ),
    "layout_packed_expanded": _Shape(
        l=20, packed=((0, 0), (1, 7)), gated=True,
        layouts={"seq_idx": expanded_first, "x": expanded_first},
    ),
    "layout_transposed_length_1": _Shape(
        l=1, H=1, gated=True, layouts=dict.fromkeys(_SEQUENCES, time_last)
    ),
    "discrete": _Shape(discrete=True),
    "discrete_one_of_everything": _Shape(b=1, l=1, H=1, P=1, N=1, discrete=True),
    "discrete_no_steps": _Shape(l=0, discrete=True),
    "discrete_empty_batch": _Shape(b=0, discrete=True),
    "discrete_chunk_minus_1": _Shape(l=CHUNK - 1, discrete=True, initial=False),
    "discrete_chunk_plus_1": _Shape(l=CHUNK + 1, discrete=True, skip=False),
    "discrete_groups": _Shape(l=70, H=6, G=3, P=17, N=19, discrete=True),
    "discrete_cut_off": _Shape(b=1, l=140, P=17, discrete=True, layouts={"log_decay": cut_off}),
    "discrete_mamba_3": _Shape(b=1, l=130, H=4, G=4, P=64, N=128, discrete=True),
    "discrete_many_units": _Shape(b=2, l=200, H=12, G=12, P=16, N=16, discrete=True),
    "discrete_packed": _Shape(
        b=3, l=3 * CHUNK + 5, P=18, N=20, discrete=True,
        packed=((0, 0), (1, CHUNK - 1), (2, 2 * CHUNK - 1), (3, 2 * CHUNK + 9), (0, 3 * CHUNK)),
    ),
    "layout_discrete_transposed": _Shape(
        l=67, P=18, N=20, discrete=True,
        layouts=dict.fromkeys((*_DISCRETE, "D", "initial_states"), transposed),
    ),
    "layout_discrete_time_last": _Shape(
        l=67, P=18, N=20, discrete=True, layouts=dict.fromkeys(_DISCRETE, time_last)
    ),
    "layout_discrete_sliced": _Shape(
        l=67, P=18, N=20, discrete=True,
        layouts=dict.fromkeys((*_DISCRETE, "D", "initial_states"), sliced),
    ),
    "layout_discrete_expanded": _Shape(
        l=20, discrete=True, packed=((0, 0), (1, 7)),
        layouts=dict.fromkeys(_DISCRETE, expanded_time) | {"seq_idx": expanded_first},
    ),
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(
    Case(name, shape.operator, shape.make) for name, shape in _SHAPES.items()
)

BENCH: tuple[Case, ...] = (
    Case("mamba_2_130m", "ssd_chunk_scan", _Shape(b=1, l=1024, H=24, P=64, N=128).make),
    Case("batch_4", "ssd_chunk_scan", _Shape(b=4, l=512, H=24, P=64, N=128).make),
    Case(
        "mamba_3",
        "ssd_chunk_scan_discrete",
        _Shape(b=1, l=1024, H=24, G=24, P=64, N=128, discrete=True).make,
    ),
)

_OF_STEPS = ("ssd_chunk_scan", "ssd_chunk_scan_gated")
_FORWARDS = (*_OF_STEPS, "ssd_chunk_scan_discrete")

BUGS: tuple[PlantedBug, ...] = (
    *(
        PlantedBug(
            "groups in turn",
            "head i takes group i % G of B and C",
            operator,
            groups_in_turn(("B", "C"), 4, 2, "x", 2),
        )
        for operator in _FORWARDS
    ),
    *(
        PlantedBug(
            "sequences joined",
            "packed sequences read each other's states",
            operator,
            reads({"seq_idx": lambda given: torch.zeros_like(given["seq_idx"])}),
        )
        for operator in _FORWARDS
    ),
    *(
        PlantedBug(
            "softplus's derivative",
            "the backward is without it",
            f"{operator}_backward",
            softplus_underived("dt", "dt_bias", 2, "dt_softplus"),
        )
        for operator in _OF_STEPS
    ),
    PlantedBug(
        "SiLU's derivative",
        "the backward takes the sigmoid for the gate's derivative",
        "ssd_chunk_scan_gated_backward",
        silu_underived("z"),
    ),
)
