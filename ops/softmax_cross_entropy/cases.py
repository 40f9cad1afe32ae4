"""The cases of the loss: classes around those of vectors and blocks, options, memory layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuseport.ops.bugs import reads, returns
from fuseport.ops.case_layouts import expanded_first, expanded_last, sliced, transposed
from fuseport.ops.spec import Case, Inputs, Outputs, PlantedBug

__all__ = ["BUGS", "CASES"]


@dataclass(frozen=True)
class _Shape:
    n: int = 5
    classes: int = 11
    ignore_index: int = -100
    ignored: tuple[int, ...] = ()  # rows
    smoothing: float = 0.0
    scale: float = 2.0
    offset: float = 0.0
    ruled_out: bool = False  # some classes, by logits of -Inf
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """Drawn in float64 and then rounded, so that all dtypes see the same values."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(self.n, self.classes, generator=generator, dtype=torch.float64)
        targets = torch.randint(self.classes, (self.n,), generator=generator)
        if self.ruled_out:
            logits[:, 1::3] = -torch.inf
            targets -= (targets % 3 == 1).long()
        targets[list(self.ignored)] = self.ignore_index
        values = {"logits": (self.scale * logits + self.offset).to(dtype), "targets": targets}
        for name, layout in self.layouts.items():
            values[name] = layout(values[name])
        return {
            **values,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.smoothing,
        }


def _of_more_classes(t: Tensor) -> Tensor:
    return torch.cat([t, torch.full_like(t, float("nan"))], 1)[:, : t.shape[1]]


def _every_second(t: Tensor) -> Tensor:
    return t.repeat_interleave(2)[::2]


_SHAPES = {
    "plain": _Shape(),
    "one_of_everything": _Shape(1, 1),
    "classes_2": _Shape(3, 2),
    "classes_16": _Shape(3, 16),
    "classes_65": _Shape(3, 65),
    "classes_1100": _Shape(3, 1100),
    "classes_2085": _Shape(2, 2085, smoothing=0.1),
    "many_units": _Shape(60, 700),
    "smoothing": _Shape(smoothing=0.1),
    "smoothing_1": _Shape(smoothing=1.0),
    "ignored": _Shape(ignored=(1, 4)),
    "ignored_smoothing": _Shape(ignored=(0,), smoothing=0.3),
    "ignored_all": _Shape(n=2, ignored=(0, 1)),
    "ignore_index_3": _Shape(ignore_index=3, ignored=(2,)),
    "ignore_index_beyond": _Shape(ignore_index=11, ignored=(2,)),
    "far_from_0": _Shape(offset=-60.0, classes=40),
    "wide_range": _Shape(scale=40.0, classes=40),
    "ruled_out": _Shape(ruled_out=True, classes=12),
    "no_rows": _Shape(n=0),
    "layout_classes_first": _Shape(classes=20, layouts={"logits": transposed}),
    "layout_of_more_classes": _Shape(classes=20, layouts={"logits": _of_more_classes}),
    "layout_sliced": _Shape(layouts={"logits": sliced, "targets": _every_second}),
    "layout_expanded": _Shape(layouts={"logits": expanded_first}),
    "layout_expanded_classes": _Shape(layouts={"logits": expanded_last}),
}

CASES: tuple[Case, ...] = tuple(
    Case(name, "softmax_cross_entropy", shape.make) for name, shape in _SHAPES.items()
)


def _counted(given: Inputs, found: Outputs) -> Tensor:
    """Rows that are ignored get the gradient of class 0."""
    logits, ignored = given["logits"], given["targets"] == given["ignore_index"]
    wrong = logits.double().softmax(-1)
    wrong[:, :1] -= 1
    gradient: Tensor = given["dlosses"].double()[:, None] * wrong
    return gradient.where(ignored[:, None], found["dlogits"].double())


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "ignored rows counted",
        "the backward takes rows that are ignored for rows of class 0",
        "softmax_cross_entropy_backward",
        returns({"dlogits": _counted}),
    ),
    *(
        PlantedBug(
            "smoothing forgotten",
            "labels are not smoothed",
            operator,
            reads({"label_smoothing": lambda given: 0.0}),
        )
        for operator in ("softmax_cross_entropy", "softmax_cross_entropy_backward")
    ),
)
