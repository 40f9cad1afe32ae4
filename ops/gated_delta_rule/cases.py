"""The cases of the gated delta rule: shapes at edges of chunks and vectors, options, layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import groups_in_turn, reads, returns
from fuseport.ops.case_layouts import (
    Layout,
    expanded_first,
    expanded_last,
    expanded_time,
    heads_first,
    offset_last,
    sliced,
    time_last,
    transposed,
)
from fuseport.ops.spec import Case, Inputs, Outputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]

CHUNK = 32
"""Steps between the states that the kernels' backward keeps: as in kernel.hpp."""


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    l: int = 9  # noqa: E741
    G: int = 3
    H: int = 3
    K: int = 6
    V: int = 5
    channels: bool = False  # a decay for each key channel
    initial: bool = True
    forgets: float = -1.0  # the mean of log(-g), and its standard deviation
    spread: float = 1.0
    scale: float = 0.4
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, l, H, K, V = self.b, self.l, self.H, self.K, self.V  # noqa: E741
        key, rates = normal(b, l, self.G, K), normal(b, l, H, K if self.channels else 1)
        values = {
            "q": normal(b, l, self.G, K).to(dtype),
            # Of length 1: longer ones have states grow.
            "k": (key / key.norm(dim=-1, keepdim=True)).to(dtype),
            "v": normal(b, l, H, V).to(dtype),
            "g": -(rates * self.spread + self.forgets).exp().to(wide),
            "beta": normal(b, l, H).sigmoid().to(wide),
            "initial_state": (normal(b, H, K, V) * self.initial).to(wide),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {**values, "scale": self.scale}


_SEQUENCES = ("q", "k", "v", "g", "beta")
_ALL = (*_SEQUENCES, "initial_state")
_SHAPES = {
    "plain": _Shape(),
    "channels": _Shape(channels=True),
    "no_initial_state": _Shape(initial=False),
    "one_of_everything": _Shape(b=1, l=1, G=1, H=1, K=1, V=1),
    "length_1": _Shape(l=1, channels=True),
    "no_steps": _Shape(l=0),
    "no_steps_channels": _Shape(l=0, channels=True),
    "empty_batch": _Shape(b=0),
    "groups": _Shape(l=20, G=2, H=6),
    "groups_channels": _Shape(l=20, G=3, H=6, channels=True),
    "one_group": _Shape(G=1, H=4),
    "chunk_minus_1": _Shape(l=CHUNK - 1),
    "chunk": _Shape(l=CHUNK, channels=True),
    "chunk_plus_1": _Shape(l=CHUNK + 1),
    "chunks_2": _Shape(l=2 * CHUNK, G=1, channels=True),
    "chunks_3_minus_1": _Shape(l=3 * CHUNK - 1, G=1, H=2),
    # More than a segment of the CUDA kernels, with rows in registers and in memory.
    "chunks_9": _Shape(b=2, l=8 * CHUNK + 3, G=1, H=2, K=3, V=2),
    "chunks_9_key_260": _Shape(b=1, l=8 * CHUNK + 1, G=1, H=1, K=260, V=1, channels=True),
    "remembers": _Shape(l=2 * CHUNK + 3, forgets=-6.0, channels=True),
    "forgets": _Shape(l=CHUNK + 5, forgets=3.0),
    "forgets_channels": _Shape(l=CHUNK + 5, forgets=3.0, channels=True),
    # A decay below the normal numbers of float32.
    "faint": _Shape(l=1, forgets=4.55, spread=0.0, channels=True),
    "width_17": _Shape(l=35, K=17, V=19, channels=True),
    "width_33": _Shape(b=1, l=35, K=33, V=34, G=1, H=2),
    "key_1": _Shape(l=35, K=1, V=33),
    "value_1": _Shape(l=35, K=33, V=1, channels=True),
    "key_300": _Shape(b=1, l=CHUNK + 2, G=1, H=1, K=300, V=3, channels=True),
    "widths_apart": _Shape(b=1, l=12, K=70, V=12, channels=True, G=1, H=2),
    "qwen": _Shape(b=1, l=10, G=1, H=2, K=128, V=128),
    "kimi": _Shape(b=1, l=10, G=1, H=1, K=128, V=128, channels=True),
    "many_units": _Shape(b=2, l=130, G=4, H=8, K=32, V=16),  # worth several threads
    "layout_transposed": _Shape(
        l=35, K=18, V=20, channels=True, layouts=dict.fromkeys(_ALL, transposed)
    ),
    "layout_time_last": _Shape(l=35, K=18, V=20, layouts=dict.fromkeys(_SEQUENCES, time_last)),
    "layout_heads_first": _Shape(
        l=35, K=18, V=20, channels=True, layouts=dict.fromkeys(_SEQUENCES, heads_first)
    ),
    "layout_sliced": _Shape(l=35, K=18, V=20, channels=True, layouts=dict.fromkeys(_ALL, sliced)),
    "layout_offset": _Shape(
        l=35, K=18, V=20, layouts=dict.fromkeys(("q", "k", "v", "g", "beta"), offset_last)
    ),
    "layout_expanded_batch": _Shape(channels=True, layouts=dict.fromkeys(_ALL, expanded_first)),
    "layout_expanded_time": _Shape(layouts=dict.fromkeys(_SEQUENCES, expanded_time)),
    "layout_expanded_channels": _Shape(channels=True, layouts={"g": expanded_last}),
    "layout_transposed_size_1": _Shape(
        l=1, G=1, H=1, layouts=dict.fromkeys(_ALL, transposed)
    ),
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(
    Case(name, "gated_delta_rule", shape.make) for name, shape in _SHAPES.items()
)

BENCH: tuple[Case, ...] = (
    Case("qwen3_next", "gated_delta_rule", _Shape(1, 1024, 16, 32, 128, 128, initial=False).make),
    Case(
        "kimi_linear",
        "gated_delta_rule",
        _Shape(1, 512, 32, 32, 128, 128, channels=True, initial=False).make,
    ),
)


def _as(mistake: str, given: Inputs) -> tuple[Tensor, Tensor]:
    """out and final_state of the recurrence with a mistake in it."""
    state, wide, outs = given["initial_state"], given["g"].dtype, []
    size = given["v"].shape[2] // given["q"].shape[2]
    q, k = (given[n].to(wide).repeat_interleave(size, 2).unsqueeze(4) for n in ("q", "k"))
    decays = given["g"].exp().unsqueeze(4)
    for t in range(given["v"].shape[1]):
        key, rate = k[:, t], given["beta"][:, t, :, None, None]
        value = given["v"][:, t].to(wide).unsqueeze(2)
        decayed = decays[:, t] * state
        read = ((state if mistake == "decay" else decayed) * key).sum(2, keepdim=True)
        state = decayed + key * (rate * value - (1 if mistake == "rate" else rate) * read)
        seen = decayed if mistake == "order" else state
        outs.append((seen * q[:, t]).sum(2) * given["scale"])
    return (torch.stack(outs, 1) if outs else given["v"].to(wide)), state


def _out(mistake: str) -> PlantedBug:
    name, description = {
        "decay": ("decay after the reading", "what a key stands for is read before the decay"),
        "rate": ("rate of the erasure", "what a key stands for is erased whole, not by beta"),
        "order": ("query before the update", "the output is that of the state before the update"),
    }[mistake]

    def out(given: Inputs, found: Outputs) -> Tensor:
        return _as(mistake, given)[0]

    def final_state(given: Inputs, found: Outputs) -> Tensor:
        return _as(mistake, given)[1]

    edits = {"out": out} if mistake == "order" else {"out": out, "final_state": final_state}
    return PlantedBug(name, description, "gated_delta_rule", returns(edits))


BUGS: tuple[PlantedBug, ...] = (
    *map(_out, ("decay", "rate", "order")),
    PlantedBug(
        "scale left out",
        "outputs are not multiplied by it",
        "gated_delta_rule",
        reads({"scale": lambda given: 1.0}),
    ),
    PlantedBug(
        "groups in turn",
        "head i takes head i % G of q and k",
        "gated_delta_rule",
        groups_in_turn(("q", "k"), 4, 2, "v", 2),
    ),
    PlantedBug(
        "decay's derivative",
        "the backward takes the state before the decay for its derivative",
        "gated_delta_rule_backward",
        returns({"dg": lambda given, found: found["dg"] / given["g"].exp().clamp(min=1e-3)}),
    ),
    PlantedBug(
        "beta by the value alone",
        "the backward leaves out of beta's gradient what is erased",
        "gated_delta_rule_backward",
        returns(
            {
                "dbeta": lambda given, found: (
                    (found["dv"].to(given["g"].dtype) * given["v"].to(given["g"].dtype)).sum(3)
                    / given["beta"].clamp(min=1e-3)
                )
            }
        ),
    ),
)
