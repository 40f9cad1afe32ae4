"""The cases of a norm: shapes around the edges of vectors and tiles, groups, memory layouts.

`rms_norm_gated` has the same shapes and layouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import returns
from fuseport.ops.case_layouts import Layout, expanded_first, expanded_last, sliced, transposed
from fuseport.ops.spec import FLOATING, Case, Inputs, Outputs, PlantedBug, Run

__all__ = [
    "BENCH",
    "BUGS",
    "CASES",
    "LAYOUTS",
    "SHAPES",
    "NormShape",
    "reordered",
    "split_projection",
]


HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NormShape:
    """What a case is made from; `norm_before_gate` is None where there is no gate."""

    shape: tuple[int, ...] = (2, 3, 8)
    group_size: int | None = None
    eps: float = 1e-5
    wide_weight: bool = True
    norm_before_gate: bool | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        d = self.shape[-1]
        scale = normal(*self.shape[:-1], 1).exp()
        values = {"x": (normal(*self.shape) * scale).to(dtype)}
        z = normal(*self.shape).to(dtype)
        if self.norm_before_gate is not None:
            values["z"] = z
        weight = 1 + 0.3 * normal(d)
        values["weight"] = weight.to(
            torch.float32 if self.wide_weight and dtype in HALVES else dtype
        )
        for name, layout in self.layouts.items():
            if name in values:
                values[name] = layout(values[name])
        plain: Inputs = {"eps": self.eps, "group_size": self.group_size or max(d, 1)}
        if self.norm_before_gate is not None:
            plain["norm_before_gate"] = self.norm_before_gate
        return {**values, **plain}


def split_projection(t: Tensor) -> Tensor:
    """The last channels of a wider projection, as `x, z = in_proj(h).chunk(2, -1)` gives."""
    d = t.shape[-1]
    buffer = t.new_full((*t.shape[:-1], 2 * d + 1), float("nan"))
    return buffer[..., d + 1 :].copy_(t)


def reordered(t: Tensor) -> Tensor:
    """Leading dimensions that no two strides describe."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


SHAPES = {
    "plain": NormShape(),
    "one_of_everything": NormShape((1, 1, 1)),
    "one_row": NormShape((37,)),
    "two_dimensions": NormShape((5, 16)),
    "four_dimensions": NormShape((2, 3, 2, 33)),
    "no_rows": NormShape((0, 3, 8)),
    "no_rows_in_the_middle": NormShape((2, 0, 8)),
    "no_channels": NormShape((2, 0)),
    "channels_1": NormShape((3, 5, 1)),
    "channels_15": NormShape((3, 15)),
    "channels_17": NormShape((3, 17)),
    "channels_63": NormShape((2, 63)),
    "channels_64": NormShape((2, 64)),
    "channels_65": NormShape((2, 65)),
    "channels_700": NormShape((3, 700)),
    "groups": NormShape((2, 3, 12), group_size=4),
    "groups_of_1": NormShape((2, 3, 6), group_size=1),
    "groups_of_32": NormShape((5, 128), group_size=32),
    "groups_of_37": NormShape((5, 111), group_size=37),
    "rows_18": NormShape((18, 20)),
    "rows_67": NormShape((67, 9)),
    "many_units": NormShape((4, 131, 192), group_size=96),
    "large_eps": NormShape(eps=0.7),
    "no_eps": NormShape(eps=0.0),
    "weight_of_xs_dtype": NormShape((4, 24), wide_weight=False),
    "weight_of_xs_dtype_in_groups": NormShape((4, 3, 24), group_size=8, wide_weight=False),
}

_ALL = ("x", "z")
LAYOUTS: dict[str, NormShape] = {
    "channels_first": NormShape((2, 35, 24), layouts=dict.fromkeys(_ALL, transposed)),
    "channels_first_x": NormShape((3, 17, 19), layouts={"x": transposed}),
    "channels_first_in_groups": NormShape(
        (2, 35, 24), group_size=12, layouts=dict.fromkeys(_ALL, transposed)
    ),
    "split_projection": NormShape((2, 5, 40), layouts=dict.fromkeys(_ALL, split_projection)),
    "sliced": NormShape((2, 5, 40), layouts=dict.fromkeys((*_ALL, "weight"), sliced)),
    "reordered": NormShape((2, 3, 4, 10), layouts=dict.fromkeys(_ALL, reordered)),
    "expanded_rows": NormShape((3, 5, 20), layouts=dict.fromkeys(_ALL, expanded_first)),
    "expanded_channels": NormShape(
        (3, 5, 20), layouts=dict.fromkeys((*_ALL, "weight"), expanded_last)
    ),
    # The strides of a dimension of size 1 say nothing, and must mislead nobody.
    "channels_first_row_1": NormShape((2, 1, 9), layouts=dict.fromkeys(_ALL, transposed)),
    "channels_first_channel_1": NormShape((2, 9, 1), layouts=dict.fromkeys(_ALL, transposed)),
    "sliced_channel_1": NormShape((4, 1), layouts=dict.fromkeys((*_ALL, "weight"), sliced)),
}

CASES: tuple[Case, ...] = (
    *(Case(name, "rms_norm", shape.make, FLOATING) for name, shape in SHAPES.items()),
    *(Case(f"layout_{name}", "rms_norm", shape.make, FLOATING) for name, shape in LAYOUTS.items()),
)

BENCH: tuple[Case, ...] = (
    Case("width_768", "rms_norm", NormShape((1, 1024, 768)).make),
    Case("width_4096", "rms_norm", NormShape((4, 512, 4096)).make),
)


def _normalised(given: Inputs) -> Tensor:
    """x as it is after the norm, without its weight."""
    n: Tensor = given["x"] * given["rstd"].repeat_interleave(given["group_size"], -1)
    return n.to(given["x"].dtype)


def _twice(right: Run, given: Inputs) -> Outputs:
    once = _normalised(given)
    parts = once.to(given["rstd"].dtype).unflatten(-1, (-1, given["group_size"]))
    rstd = (parts.square().mean(-1) + given["eps"]).rsqrt()
    return right({**given, "x": once, "rstd": rstd.to(given["rstd"].dtype)})


def _without_projection(given: Inputs, found: Outputs) -> Tensor:
    rstd = given["rstd"].repeat_interleave(given["group_size"], -1)
    gradient: Tensor = given["dout"] * given["weight"] * rstd
    return gradient


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "normalised twice",
        "the backward normalises once more what is normalised already",
        "rms_norm_backward",
        _twice,
        "mamba_inner_fn, checkpoint_lvl=1: B and C (mamba#885)",
    ),
    PlantedBug(
        "projection dropped",
        "the backward takes the norm for a constant",
        "rms_norm_backward",
        returns({"dx": _without_projection}),
    ),
    PlantedBug(
        "passes through the norm",
        "the gradient is the cotangent",
        "rms_norm_backward",
        returns({"dx": lambda given, found: given["dout"]}),
        "entrenar: its RMSNorm backward passes through",
    ),
)
