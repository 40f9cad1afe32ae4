"""Mistakes of exports: kinds of wrong files, and what makes such files of right ones.

The kinds are the same for all formats. A file of ONNX is edited as it is; one of `torch.export`
too, and a TorchScript file is written anew from the bundle's exported program with the mistake in
it.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fuseport.exporter.verify.mutants import edits
from fuseport.exporter.verify.mutants.kinds import Kind
from fuseport.exporter.verify.mutants.onnx_edits import EDITS

__all__ = ["AHEAD", "FILES", "OUTPUTS", "WEIGHTS", "Asked", "Made", "Maker", "formats", "maker"]

T = TypeVar("T")

WEIGHTS: dict[str, tuple[str, Callable[[Tensor], bool], Callable[[Tensor], Tensor]]] = {
    "weight off by 1 %": (
        "one channel of a weight is 1 % off",
        lambda t: bool(t.any()),
        lambda t: edits.off_in_one_channel(t, 1e-2),
    ),
    "weight off by 0.1 %": (
        "one channel of a weight is 0.1 % off",
        lambda t: bool(t.any()) and t.dtype.itemsize > 2,
        lambda t: edits.off_in_one_channel(t, 1e-3),
    ),
    "weight transposed": (
        "a square weight is transposed",
        lambda t: t.dim() == 2 and t.shape[0] == t.shape[1] > 1 and not torch.equal(t, t.T),
        lambda t: t.T.contiguous(),
    ),
    "weight in half": (
        "a weight was rounded to bfloat16",
        lambda t: t.dtype.itemsize > 2 and not torch.equal(t, edits.in_half(t)),
        edits.in_half,
    ),
}
"""Of weights, by name: the words, which have them, and the edit."""

OUTPUTS: dict[str, str] = {
    "output's sign": "an output or a gradient has the other sign",
    "output zero": "an output or a gradient is zero",
    "output off by 0.1 %": "an output or a gradient is 0.1 % off",
    "output cast to half": "an output or a gradient is cast to float16 and back",
    "output dropped": "an output or a gradient is missing",
    "outputs swapped": "two outputs or gradients are returned for one another",
    "size baked in": "a dynamic size is that of the example",
}
"""Of outputs and inputs, by name."""

AHEAD = 4 * 2**30
"""Bytes of wrong files that may lie there at a time."""

FILES: tuple[Kind, ...] = (
    *(Kind(name, words, "artifact") for name, (words, _, _) in WEIGHTS.items()),
    *(Kind(name, words, "artifact") for name, words in OUTPUTS.items()),
    *(Kind(f"file: {name}", e.description, "artifact") for name, e in EDITS.items()),
)


@dataclass(frozen=True)
class Made:
    """A wrong file.

    Attributes:
        kind: of the catalogue, its name.
        place: what is wrong in it, in words.
        write: writes it to a path.
    """

    kind: str
    place: str
    write: Callable[[Path], None]


@dataclass(frozen=True)
class Asked:
    """What wrong files are made of.

    Attributes:
        artifact: the right file.
        source: the exported program that a file that cannot be edited is written anew from.
        program: what the manifest says of the program.
        sizes: of dynamic dimensions, at the export.
        seed: of the places drawn.
        count: of places for each kind.
    """

    artifact: Path
    source: Path | None
    program: Mapping[str, Any]
    sizes: Mapping[str, int]
    seed: int
    count: int

    def drawn(self, found: Iterable[T], kind: str) -> list[T]:
        """So many of them, by the seed."""
        listed = list(found)
        draw = random.Random(f"{self.seed} {kind}")
        return draw.sample(listed, min(self.count, len(listed)))


Maker = Callable[[Asked], Iterator[Made]]


def formats() -> Sequence[str]:
    """Those whose files can be made wrong; the others are machine code."""
    return ("onnx", "onnx_native", "exported_program", "torchscript")


def maker(format_name: str) -> Maker:
    """What makes wrong files of a format."""
    from fuseport.exporter.verify.mutants import onnx_files, torch_files

    makers: dict[str, Maker] = {
        "onnx": onnx_files.made,
        "onnx_native": onnx_files.made,
        "exported_program": torch_files.made,
        "torchscript": torch_files.made_torchscript,
    }
    return makers[format_name]
