"""The cases of the layer: shapes around the edges of vectors, tiles and groups, memory layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import Layout, expanded_first, sliced, transposed
from fuseport.ops.matmul_nbits.storage import pack_codes, quantize_nbits, unpack_codes
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    """What a case is made from."""

    rows: tuple[int, ...] = (3,)
    in_features: int = 32
    out_features: int = 6
    bits: int = 4
    group_size: int = 16
    symmetric: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # Rows of other sizes and other means, so that a group's scale and zero point matter.
        weight = normal(self.out_features, self.in_features) + normal(self.out_features, 1)
        weight *= normal(self.out_features, 1).exp()
        stored = quantize_nbits(weight, self.bits, self.group_size, self.symmetric)
        values: dict[str, Any] = {
            "x": normal(*self.rows, self.in_features).to(dtype),
            "packed": stored.packed,
            "scales": stored.scales.to(wide(dtype)),
            "zero_points": stored.zero_points,
            "bias": normal(self.out_features).to(dtype),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        sizes = {"in_features": self.in_features, "bits": self.bits, "group_size": self.group_size}
        return {**values, **sizes}


def _reordered(t: Tensor) -> Tensor:
    """Leading dimensions that no two strides describe."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


_SHAPES = {
    "plain": _Shape(),
    "one_of_everything": _Shape((1, 1), 1, 1),
    "no_leading_dimension": _Shape((), 48, 5),
    "no_rows": _Shape((2, 0)),
    "no_inputs": _Shape((3,), 0, 4),
    "no_outputs": _Shape((3,), 8, 0),
    "groups_of_128": _Shape((2, 3), 256, 7, group_size=128),
    "symmetric": _Shape((2, 3), 64, 5, group_size=32, symmetric=True),
    "one_group": _Shape((3,), 96, 5, group_size=96),
    "bits_8": _Shape((3,), 64, 9, 8, 32),
    "bits_8_odd": _Shape((2, 2), 37, 11, 8),
    "bits_8_rows_20": _Shape((20,), 96, 33, 8, 48),
    "bits_2": _Shape((3,), 64, 9, 2, 32),
    "bits_2_odd": _Shape((2, 2), 39, 11, 2),
    # Groups that end beyond the row, an odd number of them, whose zero points end within a byte.
    "odd_inputs": _Shape((2, 2), 37, 5),
    "odd_groups": _Shape((5,), 72, 3, group_size=32),
    "group_beyond_the_row": _Shape((4,), 40, 9, group_size=64),
    "one_input": _Shape((4,), 1, 33),
    "one_output": _Shape((4,), 100, 1, group_size=32),
    # Around tiles of rows, of outputs and of inputs.
    "one_row_wide": _Shape((1,), 384, 66, group_size=128),
    "rows_16": _Shape((16,), 96, 35, group_size=32),
    "rows_17": _Shape((17,), 160, 67, group_size=32),
    "rows_300": _Shape((2, 150), 20, 9),
    "outputs_130": _Shape((3,), 64, 131, group_size=64),
    "inputs_1100": _Shape((18,), 1100, 7, group_size=64),
    "inputs_1100_one_row": _Shape((1,), 1100, 13, group_size=128),
    "inputs_1000": _Shape((2,), 1000, 20, group_size=48),
    "layout_transposed": _Shape((2, 5), 48, 6, layouts={"x": transposed}),
    "layout_reordered": _Shape((2, 3, 2), 48, 6, layouts={"x": _reordered}),
    "layout_expanded": _Shape((4,), 48, 6, layouts={"x": expanded_first}),
    "layout_every_second": _Shape(
        (2, 5),
        48,
        6,
        layouts=dict.fromkeys(("x", "packed", "scales", "zero_points", "bias"), sliced),
    ),
}

CASES: tuple[Case, ...] = tuple(Case(n, "matmul_nbits", s.make) for n, s in _SHAPES.items())

BENCH: tuple[Case, ...] = tuple(
    Case(f"{rows}_rows_{n}_by_{k}", "matmul_nbits", _Shape((rows,), k, n, group_size=128).make)
    for n, k in ((1024, 1024), (4096, 1024))
    for rows in (1, 16, 512)
)


def _codes_turned(given: Inputs) -> Tensor:
    codes = unpack_codes(given["packed"], given["bits"])
    per_byte = 8 // given["bits"]
    return pack_codes(codes.unflatten(-1, (-1, per_byte)).flip(-1).flatten(-2), given["bits"])


def _zero_points_less_one(given: Inputs) -> Tensor:
    bits = given["bits"]
    zeros = unpack_codes(given["zero_points"], bits)
    return pack_codes(zeros - 1 & (1 << bits) - 1, bits)


BUGS: tuple[PlantedBug, ...] = tuple(
    PlantedBug(name, description, operator, reads(edits))
    for operator in ("matmul_nbits", "matmul_nbits_backward")
    for name, description, edits in (
        (
            "codes turned",
            "the high bits of a byte are read first",
            {"packed": _codes_turned},
        ),
        (
            "another group's scale",
            "a group has the scale of the one before it",
            {"scales": lambda given: given["scales"].roll(1, -1)},
        ),
        (
            "zero points less one",
            "they are taken as GPTQ's first format stores them",
            {"zero_points": _zero_points_less_one},
        ),
    )
)
