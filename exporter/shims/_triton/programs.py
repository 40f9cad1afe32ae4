"""The programs of a launch of a Triton kernel that run now, and why they cannot all run at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseport.exporter.shims._triton.places import Size

__all__ = [
    "Asked",
    "NotUniform",
    "Programs",
    "Repeats",
    "Strides",
    "Unknown",
    "programs",
    "running",
]


class Unknown(NotImplementedError):
    """Something in a kernel that has no form in torch."""


class Repeats(Unknown):
    """A loop goes over a dynamic dimension.

    Args:
        over: how far.
        step: how much of it at a time.
    """

    def __init__(self, over: Size, step: Size) -> None:
        super().__init__(
            "it repeats something as often as a dynamic dimension says: export that dimension with "
            "a fixed size"
        )
        self.over, self.step = over, step


class NotUniform(Exception):
    """Python asked for one number of what differs from program to program, or in a block.

    Args:
        axes: of the grid, along which programs differ.
        what: what the number decides.
    """

    def __init__(self, axes: Sequence[int], what: str) -> None:
        super().__init__(what)
        self.axes = tuple(axes)


class Asked(NotUniform):
    """What an atomic operation returns is asked for: it differs by which program was there first.

    Args:
        what: asks it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(programs().at_once, what)


class Strides(Exception):
    """A loop of each program goes from its own number by how many programs there are.

    Args:
        axis: of the grid.
        over: how far all of them go.
        step: how many programs there are.
    """

    def __init__(self, axis: int, over: Size, step: Size) -> None:
        super().__init__(f"programs go along axis {axis} in strides")
        self.axis, self.over, self.step = axis, over, step


@dataclass(frozen=True)
class Programs:
    """Of a launch, the programs that run at once.

    Args:
        grid: how many there are along each of three axes.
        at_once: the axes along which all run at once: the first dimensions of blocks.
        here: the place along the others.
        device: of the tensors.
        members: the functions that a block has as its methods, by name.
        joined: axes along which one program does what many are launched for.
        strided: axes along which there is a program for each turn of a loop that fewer are launched
            for, by how far the loop goes and how many were launched; None where that is no use.
        ways: which of them go the ways that run now, one within the other.
        gone: not empty once some have gone ways of their own.
    """

    grid: tuple[Size, ...]
    at_once: tuple[int, ...]
    here: Sequence[int]
    device: torch.device
    members: Callable[[str], Any]
    joined: tuple[int, ...] = ()
    strided: Mapping[int, tuple[Size, Size] | None] = field(default_factory=dict)
    ways: list[Any] = field(default_factory=list)
    gone: list[Any] = field(default_factory=list)

    def go(self, where: Any) -> None:
        """Some programs go a way of their own.

        Args:
            where: which, a value.
        """
        self.ways.append(where)
        self.gone[:] = [True]

    def come(self) -> None:
        """They are where they were before."""
        self.ways.pop()


_RUNNING: ContextVar[Programs] = ContextVar("running")


def programs() -> Programs:
    """The programs that run now."""
    return _RUNNING.get()


@contextmanager
def running(these: Programs) -> Iterator[None]:
    """For the time of the context, these programs run."""
    token = _RUNNING.set(these)
    try:
        yield
    finally:
        _RUNNING.reset(token)
