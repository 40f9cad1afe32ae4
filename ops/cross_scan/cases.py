"""The cases of walks over an image: sizes around those of vectors and tiles, memory layouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.ops.bugs import returns
from fuseport.ops.spec import Case, Inputs, Outputs, PlantedBug

__all__ = ["BUGS", "CASES", "SHAPES", "ImageShape"]


@dataclass(frozen=True)
class ImageShape:
    """An image, or with `walks` four walks over one."""

    b: int = 2
    channels: int = 3
    height: int = 5
    width: int = 7
    layout: Callable[[Tensor], Tensor] = lambda t: t
    walks: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.channels, self.height, self.width)
        whole = (self.b, 4, *shape) if self.walks else (self.b, *shape)
        t = torch.randn(whole, generator=generator, dtype=torch.float64).to(dtype)
        return {"ys" if self.walks else "x": self.layout(t)}


def _channels_last(t: Tensor) -> Tensor:
    return t.movedim(-3, -1).contiguous().movedim(-1, -3)


def _columns_first(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def _cropped(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3), float("nan"))
    return buffer[..., 1:-1, 2:-1].copy_(t)


def _of_more_channels(t: Tensor) -> Tensor:
    return torch.cat([t, torch.full_like(t, float("nan"))], -3)[..., : t.shape[-3], :, :]


SHAPES = {
    "plain": ImageShape(),
    "one_of_everything": ImageShape(1, 1, 1, 1),
    "one_row": ImageShape(height=1, width=19),
    "one_column": ImageShape(height=19, width=1),
    "square_4": ImageShape(height=4, width=4),
    "square_16": ImageShape(height=16, width=16),
    "height_17_width_33": ImageShape(height=17, width=33),
    "height_66_width_15": ImageShape(1, 2, 66, 15),
    "height_131_width_40": ImageShape(1, 1, 131, 40),  # more than two strips of rows
    "many_units": ImageShape(2, 70, 31, 35),
    "empty_batch": ImageShape(b=0),
    "no_channels": ImageShape(channels=0),
    "no_rows": ImageShape(height=0),
    "no_columns": ImageShape(width=0),
    "layout_channels_last": ImageShape(channels=9, height=18, width=6, layout=_channels_last),
    "layout_columns_first": ImageShape(height=18, width=20, layout=_columns_first),
    "layout_cropped": ImageShape(height=18, width=20, layout=_cropped),
    "layout_of_more_channels": ImageShape(height=9, width=20, layout=_of_more_channels),
    "layout_expanded": ImageShape(3, layout=lambda t: t[:1].expand(t.shape)),
}

CASES: tuple[Case, ...] = tuple(
    Case(name, "cross_scan", shape.make) for name, shape in SHAPES.items()
)


def _unturned(given: Inputs, found: Outputs) -> Tensor:
    """The third walk, row by row from the end, is the first."""
    wrong = found["out"].clone()
    wrong[:, 2] = found["out"][:, 0]
    return wrong


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "walk not reversed",
        "the walk from the end goes from the beginning",
        "cross_scan",
        returns({"out": _unturned}),
    ),
)
