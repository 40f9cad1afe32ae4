"""The cases of the rule: shapes at edges of chunks and vectors, decays, layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import reads, returns
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
    n: int = 2
    l: int = 9  # noqa: E741
    H: int = 3
    K: int = 6
    V: int = 5
    initial: bool = True
    forgets: float = -1.0  # the mean of log(-log_decay), and its standard deviation
    spread: float = 1.0
    scale: float = 0.4
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n, l, H, K, V = self.n, self.l, self.H, self.K, self.V  # noqa: E741
        read = normal(n, l, H, K)
        read = read / read.norm(dim=-1, keepdim=True)  # of length 1: longer ones have states grow
        values = {
            "q": normal(n, l, H, K).to(dtype),
            "k": (normal(n, l, H, K) / max(K, 1) ** 0.5).to(dtype),
            "v": normal(n, l, H, V).to(dtype),
            "a": (-read).to(dtype),
            "b": (read * normal(n, l, H, K).sigmoid()).to(dtype),
            "log_decay": -(normal(n, l, H, K) * self.spread + self.forgets).exp().to(wide),
            "initial_state": (normal(n, H, K, V) * self.initial).to(wide),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {**values, "scale": self.scale}


_SEQUENCES = ("q", "k", "v", "a", "b", "log_decay")
_ALL = (*_SEQUENCES, "initial_state")
_SHAPES = {
    "plain": _Shape(),
    "no_initial_state": _Shape(initial=False),
    "one_of_everything": _Shape(n=1, l=1, H=1, K=1, V=1),
    "length_1": _Shape(l=1),
    "length_2": _Shape(l=2),
    "no_steps": _Shape(l=0),
    "empty_batch": _Shape(n=0),
    "one_head": _Shape(l=20, H=1),
    "chunk_minus_1": _Shape(l=CHUNK - 1),
    "chunk": _Shape(l=CHUNK),
    "chunk_plus_1": _Shape(l=CHUNK + 1),
    "chunks_2": _Shape(l=2 * CHUNK, H=1),
    "chunks_3_minus_1": _Shape(l=3 * CHUNK - 1, H=2),
    # More than a segment of the CUDA kernels, with rows in registers and in memory.
    "chunks_9": _Shape(n=2, l=8 * CHUNK + 3, H=2, K=3, V=2),
    "chunks_9_key_260": _Shape(n=1, l=8 * CHUNK + 1, H=1, K=260, V=1),
    "remembers": _Shape(l=2 * CHUNK + 3, forgets=-6.0),
    "forgets": _Shape(l=CHUNK + 5, forgets=3.0),
    # A decay below the normal numbers of float32.
    "faint": _Shape(l=1, forgets=4.55, spread=0.0),
    "width_17": _Shape(l=35, K=17, V=19),
    "width_33": _Shape(n=1, l=35, K=33, V=34, H=2),
    "key_1": _Shape(l=35, K=1, V=33),
    "value_1": _Shape(l=35, K=33, V=1),
    "key_300": _Shape(n=1, l=CHUNK + 2, H=1, K=300, V=3),
    "widths_apart": _Shape(n=1, l=12, K=70, V=12, H=2),
    "rwkv7": _Shape(n=1, l=40, H=2, K=64, V=64, scale=1.0),
    "width_128": _Shape(n=1, l=10, H=1, K=128, V=128),
    "many_units": _Shape(n=2, l=130, H=8, K=32, V=16),  # worth several threads
    "layout_transposed": _Shape(l=35, K=18, V=20, layouts=dict.fromkeys(_ALL, transposed)),
    "layout_time_last": _Shape(l=35, K=18, V=20, layouts=dict.fromkeys(_SEQUENCES, time_last)),
    "layout_heads_first": _Shape(l=35, K=18, V=20, layouts=dict.fromkeys(_SEQUENCES, heads_first)),
    "layout_sliced": _Shape(l=35, K=18, V=20, layouts=dict.fromkeys(_ALL, sliced)),
    "layout_offset": _Shape(l=35, K=18, V=20, layouts=dict.fromkeys(_SEQUENCES, offset_last)),
    "layout_expanded_batch": _Shape(layouts=dict.fromkeys(_ALL, expanded_first)),
    "layout_expanded_time": _Shape(layouts=dict.fromkeys(_SEQUENCES, expanded_time)),
    "layout_expanded_channels": _Shape(layouts={"log_decay": expanded_last}),
    "layout_transposed_size_1": _Shape(l=1, H=1, layouts=dict.fromkeys(_ALL, transposed)),
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(
    Case(name, "dplr_delta_rule", shape.make) for name, shape in _SHAPES.items()
)

BENCH: tuple[Case, ...] = (
    Case("rwkv7_190m", "dplr_delta_rule", _Shape(1, 1024, 12, 64, 64, initial=False).make),
    Case("rwkv7_3b", "dplr_delta_rule", _Shape(1, 512, 40, 64, 64, initial=False).make),
)


def _as(mistake: str, given: Inputs) -> tuple[Tensor, Tensor]:
    """out and final_state of the recurrence with a mistake in it."""
    state, wide, outs = given["initial_state"], given["log_decay"].dtype, []
    q, k, a, b = (given[name].to(wide).unsqueeze(4) for name in ("q", "k", "a", "b"))
    decays = given["log_decay"].exp().unsqueeze(4)
    for t in range(given["v"].shape[1]):
        before, value = state, given["v"][:, t].to(wide).unsqueeze(2)
        decayed = decays[:, t] * state
        of = decayed if mistake == "decay" else state
        state = decayed + k[:, t] * value + b[:, t] * (of * a[:, t]).sum(2, keepdim=True)
        seen = before if mistake == "order" else state
        outs.append((seen * q[:, t]).sum(2) * given["scale"])
    return (torch.stack(outs, 1) if outs else given["v"].to(wide)), state


def _out(mistake: str) -> PlantedBug:
    name, description = {
        "decay": ("a reads after the decay", "of the state, a reads what a step has left of it"),
        "order": ("query before the update", "the output is that of the state before the update"),
    }[mistake]

    def out(given: Inputs, found: Outputs) -> Tensor:
        return _as(mistake, given)[0]

    def final_state(given: Inputs, found: Outputs) -> Tensor:
        return _as(mistake, given)[1]

    edits = {"out": out} if mistake == "order" else {"out": out, "final_state": final_state}
    return PlantedBug(name, description, "dplr_delta_rule", returns(edits))


BUGS: tuple[PlantedBug, ...] = (
    *map(_out, ("decay", "order")),
    PlantedBug(
        "a and b in each other's place",
        "the state is read by what is to be written with",
        "dplr_delta_rule",
        reads({"a": lambda given: given["b"], "b": lambda given: given["a"]}),
    ),
    PlantedBug(
        "scale left out",
        "outputs are not multiplied by it",
        "dplr_delta_rule",
        reads({"scale": lambda given: 1.0}),
    ),
    PlantedBug(
        "decay's derivative",
        "the backward takes the state before the decay for its derivative",
        "dplr_delta_rule_backward",
        returns(
            {
                "dlog_decay": lambda given, found: (
                    found["dlog_decay"] / given["log_decay"].exp().clamp(min=1e-3)
                )
            }
        ),
    ),
    PlantedBug(
        "readings carry nothing back",
        "the backward's cotangent of a state leaves out what a reads of it",
        "dplr_delta_rule_backward",
        reads({"a": lambda given: torch.zeros_like(given["a"])}),
    ),
)
