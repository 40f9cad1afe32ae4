"""The cases of deformable convolution: filters, groups, strides, borders, memory layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import Layout, expanded_first, sliced
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    c: int = 4
    o: int = 6
    image: tuple[int, int] = (5, 4)
    kernel: tuple[int, int] = (3, 3)
    groups: int = 1
    offset_groups: int = 1
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    reach: float = 1.5  # of offsets, in pixels
    modulated: bool = True
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        taps = self.kernel[0] * self.kernel[1]
        sizes = zip(self.image, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes]
        weight = normal(self.o, self.c // self.groups, *self.kernel)
        values = {
            "input": normal(self.b, self.c, *self.image),
            "offset": self.reach * normal(self.b, 2 * self.offset_groups * taps, *out),
            "mask": normal(self.b, self.offset_groups * taps, *out).sigmoid(),
            "weight": weight / weight.shape[1:].numel() ** 0.5,
            "bias": normal(self.o),
        }
        if not self.modulated:
            del values["mask"]
        values = {name: value.to(dtype) for name, value in values.items()}
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        named = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        options = {f"{k}_{axis}": v[i] for k, v in named.items() for i, axis in enumerate("hw")}
        return {**values, **options}


def channels_last(t: Tensor) -> Tensor:
    """As `torch.channels_last` has it."""
    return t.contiguous(memory_format=torch.channels_last)


_IMAGES = ("input", "offset", "mask")
_SHAPES = {
    "modulated": _Shape(),
    "plain": _Shape(modulated=False),
    "one_of_everything": _Shape(1, 1, 1, (1, 1), (1, 1), padding=(0, 0)),
    "one_tap": _Shape(kernel=(1, 1), padding=(0, 0), modulated=False),
    "even_filter": _Shape(kernel=(2, 4), padding=(0, 2)),
    "offset_groups": _Shape(offset_groups=2),
    "offset_groups_plain": _Shape(offset_groups=2, modulated=False),
    # Image, mask and weight have one shape: taken for one another, they fit.
    "all_alike": _Shape(c=9, o=2, image=(3, 3)),
    "all_alike_plain": _Shape(c=9, o=2, image=(3, 3), modulated=False),
    "groups": _Shape(groups=2, modulated=False),
    "groups_across_offset_groups": _Shape(c=12, groups=2, offset_groups=3, kernel=(2, 1)),
    "depthwise": _Shape(c=6, groups=6, offset_groups=3, kernel=(1, 3), padding=(0, 1)),
    "stride": _Shape(image=(9, 8), stride=(2, 3)),
    "dilation": _Shape(image=(8, 7), dilation=(2, 3), padding=(2, 3), modulated=False),
    "wide_padding": _Shape(padding=(3, 2), kernel=(2, 2)),
    "without_padding": _Shape(padding=(0, 0), image=(4, 6)),
    "far_outside": _Shape(reach=1e12),
    "no_batch": _Shape(b=0),
    "no_outputs": _Shape(o=0, modulated=False),
    # Channels and outputs of the kernels' blocks, and some more; groups that end within a block.
    "channels_70": _Shape(1, 70, 2, kernel=(1, 2), padding=(0, 1)),
    "outputs_70": _Shape(1, 3, 70, kernel=(2, 1)),
    "groups_within_blocks": _Shape(1, 72, 6, (3, 4), (1, 2), groups=3, modulated=False),
    "many_units": _Shape(1, 132, 6, (35, 33), (2, 1), groups=2, offset_groups=2),
    "larger": _Shape(b=1, c=16, o=8, image=(19, 23), offset_groups=2),
    "layout_channels_last": _Shape(layouts=dict.fromkeys((*_IMAGES, "weight"), channels_last)),
    "layout_sliced": _Shape(layouts=dict.fromkeys((*_IMAGES, "weight", "bias"), sliced)),
    "layout_expanded_batch": _Shape(layouts=dict.fromkeys(_IMAGES, expanded_first)),
}


def _case(name: str, shape: _Shape) -> Case:
    operator = "deform_conv2d_modulated" if shape.modulated else "deform_conv2d"
    return Case(name, operator, shape.make)


CASES: tuple[Case, ...] = tuple(_case(name, shape) for name, shape in _SHAPES.items())
BENCH: tuple[Case, ...] = (
    _case("256 channels, 40 x 40", _Shape(1, 256, 256, (40, 40))),
    _case("64 channels, 96 x 96", _Shape(1, 64, 64, (96, 96), offset_groups=4)),
)

BUGS: tuple[PlantedBug, ...] = tuple(
    PlantedBug(
        "x and y swapped",
        "offsets are read as (x, y)",
        operator,
        reads(
            {"offset": lambda given: given["offset"].unflatten(1, (-1, 2)).flip(2).flatten(1, 2)}
        ),
    )
    for operator in ("deform_conv2d_modulated", "deform_conv2d_modulated_backward")
)
