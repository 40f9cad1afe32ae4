"""The cases of correlation: kernels, patches, strides, borders, memory layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.bugs import reads
from fuseport.ops.case_layouts import Layout, expanded_first, offset_channels, sliced
from fuseport.ops.deform_conv2d.cases import channels_last
from fuseport.ops.spec import Case, Inputs, PlantedBug

__all__ = ["BENCH", "BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    b: int = 2
    c: int = 5
    image: tuple[int, int] = (6, 7)
    kernel: tuple[int, int] = (1, 1)
    patch: tuple[int, int] = (3, 5)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    dilation_patch: tuple[int, int] = (1, 1)
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        values: Inputs = {}
        for name in ("input1", "input2"):
            drawn = torch.randn(
                self.b, self.c, *self.image, generator=generator, dtype=torch.float64
            )
            values[name] = self.layouts.get(name, _as_it_is)(drawn.to(dtype))
        named = ("kernel", "patch", "stride", "padding", "dilation", "dilation_patch")
        for name in named:
            values[f"{name}_h"], values[f"{name}_w"] = getattr(self, name)
        return values


def _as_it_is(t: Tensor) -> Tensor:
    return t


_IMAGES = ("input1", "input2")
_SHAPES = {
    "plain": _Shape(),
    "one_of_everything": _Shape(1, 1, (1, 1), patch=(1, 1)),
    "one_displacement": _Shape(patch=(1, 1)),
    "one_row": _Shape(patch=(1, 9), image=(3, 20)),
    "one_column": _Shape(patch=(9, 1), image=(20, 3)),
    "even_patch": _Shape(patch=(2, 4), dilation_patch=(2, 2)),
    "dilated_patch": _Shape(patch=(5, 3), dilation_patch=(2, 3), image=(9, 11)),
    "patch_beyond_the_image": _Shape(patch=(7, 9), dilation_patch=(3, 2), image=(3, 2)),
    "padding": _Shape(padding=(2, 1)),
    "negative_padding": _Shape(padding=(-2, -1), patch=(5, 3)),
    "first_place_between_two_rows": _Shape(padding=(-1, -2), patch=(5, 3)),
    "stride": _Shape(stride=(2, 3), padding=(1, 2), image=(9, 14)),
    "stride_and_dilated_patch": _Shape(
        stride=(2, 3), patch=(5, 5), dilation_patch=(3, 2), image=(11, 20)
    ),
    "stride_beyond_the_image": _Shape(stride=(50, 50), padding=(6, 9)),
    "kernel": _Shape(kernel=(3, 2)),
    "kernel_stride_padding": _Shape(
        kernel=(3, 3), stride=(2, 2), padding=(2, 1), image=(9, 8), patch=(3, 3)
    ),
    "kernel_dilation": _Shape(
        kernel=(2, 3), dilation=(3, 2), stride=(2, 1), image=(8, 11), patch=(2, 3)
    ),
    "kernel_negative_padding": _Shape(
        kernel=(2, 2), dilation=(2, 2), stride=(3, 3), padding=(-1, -2), image=(12, 13)
    ),
    "all_alike": _Shape(2, 3, (3, 3), (3, 3), (3, 3), padding=(1, 1)),
    "no_batch": _Shape(b=0),
    "no_channels": _Shape(c=0),
    # Around the sizes of the kernels' blocks.
    "channels_70": _Shape(1, 70, (4, 18)),
    "channels_131": _Shape(1, 131, (3, 5), patch=(2, 2)),
    "width_33": _Shape(1, 9, (5, 33), patch=(9, 9)),
    "flownet": _Shape(1, 6, (7, 9), patch=(21, 21), dilation_patch=(2, 2)),
    "many_units": _Shape(2, 40, (23, 35), patch=(7, 7)),
    "layout_channels_last": _Shape(layouts=dict.fromkeys(_IMAGES, channels_last)),
    "layout_sliced": _Shape(layouts=dict.fromkeys(_IMAGES, sliced)),
    "layout_channels_of_more": _Shape(layouts={"input2": offset_channels}),
    "layout_expanded_batch": _Shape(layouts=dict.fromkeys(_IMAGES, expanded_first)),
}

CASES: tuple[Case, ...] = tuple(
    Case(name, "correlation", shape.make) for name, shape in _SHAPES.items()
)
BENCH: tuple[Case, ...] = (
    Case(
        "PWC-Net, 64 channels, 48 x 112, patch 9",
        "correlation",
        _Shape(1, 64, (48, 112), patch=(9, 9)).make,
    ),
    Case(
        "FlowNetC, 256 channels, 48 x 64, patch 21",
        "correlation",
        _Shape(1, 256, (48, 64), patch=(21, 21), dilation_patch=(2, 2)).make,
    ),
)


def _begins_elsewhere(given: Inputs) -> Tensor:
    """What `input2` is taken for where displacements begin at -⌊dilation_patch·(patch - 1)/2⌋."""
    down, right = (
        given[f"dilation_patch_{axis}"] * (given[f"patch_{axis}"] - 1) // 2
        - (given[f"patch_{axis}"] - 1) // 2 * given[f"dilation_patch_{axis}"]
        for axis in "hw"
    )
    return F.pad(given["input2"], (right, -right, down, -down))


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "the other image moves",
        "displacements are those of the first image",
        "correlation",
        reads({"input1": lambda given: given["input2"], "input2": lambda given: given["input1"]}),
    ),
    PlantedBug(
        "displacements begin elsewhere",
        "an even patch with an even step begins half a step later in the forward pass",
        "correlation",
        reads({"input2": _begins_elsewhere}),
        "spatial_correlation_sampler and mmcv: their CUDA forward, but neither the backward nor "
        "the CPU's forward",
    ),
)
