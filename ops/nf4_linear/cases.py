"""The cases of the layer: shapes around the edges of vectors, tiles and blocks, memory layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.nf4_linear.storage import QUANT_TYPES, quantize_4bit
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]

Layout = Callable[[Tensor], Tensor]
"""Copies a tensor into some memory layout; the values stay."""


@dataclass(frozen=True)
class _Shape:
    """What a case is made from."""

    rows: tuple[int, ...] = (3,)
    in_features: int = 32
    out_features: int = 6
    block_size: int = 16
    quant_type: str = "nf4"
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # Rows of other sizes, so that a block's scale matters.
        weight = normal(self.out_features, self.in_features) * normal(self.out_features, 1).exp()
        packed, absmax = quantize_4bit(weight, self.block_size, self.quant_type)
        values = {
            "x": normal(*self.rows, self.in_features).to(dtype),
            "packed": packed,
            "absmax": absmax.to(wide(dtype)),
            "bias": normal(self.out_features).to(dtype),
        }
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {
            **values,
            "in_features": self.in_features,
            "block_size": self.block_size,
            "quant_type": QUANT_TYPES.index(self.quant_type),
        }


def _transposed(t: Tensor) -> Tensor:
    """The last two dimensions trade places in memory."""
    return t.mT.contiguous().mT


def _reordered(t: Tensor) -> Tensor:
    """Leading dimensions that no two strides describe."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _every_second(t: Tensor) -> Tensor:
    """Every second element of a larger buffer."""
    buffer = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=t.dtype)
    return buffer[..., 1::2].copy_(t)


def _expanded(t: Tensor) -> Tensor:
    """The first row for all: stride 0."""
    return t[:1].expand(t.shape)


_SHAPES = {
    "plain": _Shape(),
    "one_of_everything": _Shape((1, 1), 1, 1),
    "no_leading_dimension": _Shape((), 48, 5),
    "no_rows": _Shape((2, 0)),
    "no_inputs": _Shape((3,), 0, 4),
    "no_outputs": _Shape((3,), 8, 0),
    "blocks_of_64": _Shape((2, 3), 64, 7, 64),
    "blocks_of_4096": _Shape((2, 3), 64, 5, 4096),
    # Blocks and bytes that go over the edges of rows.
    "odd_inputs": _Shape((2, 2), 37, 5),
    "odd_values": _Shape((5,), 7, 3),
    "blocks_over_rows": _Shape((4,), 40, 9, 64),
    "one_input": _Shape((4,), 1, 33),
    "one_output": _Shape((4,), 100, 1, 32),
    # Around tiles of rows, of outputs and of inputs.
    "one_row_wide": _Shape((1,), 384, 66, 64),
    "rows_16": _Shape((16,), 96, 35),
    "rows_17": _Shape((17,), 160, 67, 32),
    "rows_300": _Shape((2, 150), 20, 9),
    "outputs_130": _Shape((3,), 64, 131, 64),
    "inputs_1100": _Shape((18,), 1100, 7, 64),
    "inputs_1100_one_row": _Shape((1,), 1100, 13, 64),
    "inputs_1000": _Shape((2,), 1000, 20, 32),
    # Each way that values are decoded on a CPU: in registers, by vectors, one by one.
    "fp4": _Shape((3,), 72, 40, 16, "fp4"),
    "fp4_odd": _Shape((2, 3), 37, 11, 32, "fp4"),
    "fp4_rows_20": _Shape((20,), 64, 33, 64, "fp4"),
    "layout_transposed": _Shape((2, 5), 48, 6, layouts={"x": _transposed}),
    "layout_reordered": _Shape((2, 3, 2), 48, 6, layouts={"x": _reordered}),
    "layout_expanded": _Shape((4,), 48, 6, layouts={"x": _expanded}),
    "layout_every_second": _Shape(
        (2, 5), 48, 6, layouts=dict.fromkeys(("x", "packed", "absmax", "bias"), _every_second)
    ),
}

CASES: tuple[Case, ...] = tuple(Case(n, "nf4_linear", s.make) for n, s in _SHAPES.items())

BENCH: tuple[Case, ...] = tuple(
    Case(f"{rows}_rows_{n}_by_{k}", "nf4_linear", _Shape((rows,), k, n, 64).make)
    for n, k in ((1024, 1024), (4096, 1024))
    for rows in (1, 16, 512)
)


def _nibbles_swapped(given: Inputs) -> Tensor:
    packed: Tensor = given["packed"]
    return (packed << 4) | (packed >> 4)


BUGS: tuple[PlantedBug, ...] = tuple(
    PlantedBug(name, description, operator, reads(edits))
    for operator in ("nf4_linear", "nf4_linear_backward")
    for name, description, edits in (
        (
            "nibbles swapped",
            "the low half of a byte is read first",
            {"packed": _nibbles_swapped},
        ),
        (
            "another block's scale",
            "a block has the scale of the one before it",
            {"absmax": lambda given: given["absmax"].roll(1, 0)},
        ),
        (
            "another code",
            "the weight is taken to be in the other code",
            {"quant_type": lambda given: 1 - given["quant_type"]},
        ),
    )
)
