"""What names and shapes of a checkpoint's tensors say of the ops that its model calls."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Evidence"]


@dataclass(frozen=True)
class Evidence:
    """Tensors that stand together in a module whose code calls an op, or does the same without it.

    Names are those under the module, as patterns of `fnmatch`: `conv1d.weight`, `*norm*.weight`. A
    segment of a pattern is a segment of the name.

    Attributes:
        what: the module, as a user knows it: "a Mamba-1 mixer".
        tensors: by pattern, the sizes, None for any. All of them are there.
        absent: patterns; none of them is there.
    """

    what: str
    tensors: Mapping[str, tuple[int | None, ...]]
    absent: tuple[str, ...] = ()
