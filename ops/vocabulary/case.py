"""What a case of the vocabulary is: data, from which every tensor follows by the seed."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fuseport.ops.spec import FLOATING, Inputs

__all__ = [
    "Draw",
    "PlainCase",
    "PlainOperator",
    "apart",
    "away",
    "exact",
    "flags",
    "indices",
    "normal",
    "permuted",
    "positive",
    "row",
]

Kind = Literal[
    "normal", "positive", "away", "apart", "row", "indices", "permuted", "exact", "flags"
]
Layout = Literal["contiguous", "transposed", "sliced", "expanded"]


@dataclass(frozen=True)
class Draw:
    """How one tensor comes about; the functions of this module make them.

    Attributes:
        shape: its sizes.
        kind: the name of the function.
        high: of integers, the exclusive upper bound.
        scale: what floating values are multiplied by.
        values: nested lists, of `exact`.
    """

    shape: tuple[int, ...]
    kind: Kind = "normal"
    high: int | None = None
    scale: float = 1.0
    values: Any = None

    @property
    def floating(self) -> bool:
        """Whether it takes the dtype that a case is made in."""
        if self.kind == "exact":
            return torch.tensor(self.values).is_floating_point()
        return self.kind not in ("indices", "permuted", "flags")

    def make(self, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """The tensor, contiguous; floating ones in `dtype`, rounded from float64."""
        if self.kind == "exact":
            tensor = torch.tensor(self.values)
            return tensor.to(dtype) if self.floating else tensor
        if self.kind == "indices":
            assert self.high is not None
            return torch.randint(self.high, self.shape, generator=generator)
        if self.kind == "permuted":
            assert self.high is not None
            draws = torch.rand((self.high, *self.shape[1:]), generator=generator)
            return draws.argsort(0)[: self.shape[0]]
        if self.kind == "flags":
            return torch.rand(self.shape, generator=generator) < 0.6
        return (self._floating(generator) * self.scale).to(dtype)

    def _floating(self, generator: torch.Generator) -> Tensor:
        wide = torch.float64
        if self.kind == "row":
            values = torch.randn(self.shape[-1:], generator=generator, dtype=wide)
            return values.expand(self.shape).contiguous()
        if self.kind == "positive":
            return 0.5 + 2 * torch.rand(self.shape, generator=generator, dtype=wide)
        if self.kind == "apart":
            count = math.prod(self.shape)
            order = torch.randperm(count, generator=generator).to(wide)
            return ((order - count / 2 + 0.25) * (4 / max(1, count))).reshape(self.shape)
        values = torch.randn(self.shape, generator=generator, dtype=wide)
        if self.kind == "away":
            return values + torch.where(values < 0, -0.1, 0.1)
        return values


def normal(*shape: int, scale: float = 1.0) -> Draw:
    """Normal values."""
    return Draw(shape, scale=scale)


def positive(*shape: int, scale: float = 1.0) -> Draw:
    """Uniform in 0.5 to 2.5: denominators, arguments of logarithms, variances."""
    return Draw(shape, "positive", scale=scale)


def away(*shape: int, scale: float = 1.0) -> Draw:
    """Normal values, moved from 0 by a tenth: for functions with a kink there."""
    return Draw(shape, "away", scale=scale)


def apart(*shape: int) -> Draw:
    """Values in -2 to 2 no two of which are close, none of them 0: for maxima."""
    return Draw(shape, "apart")


def row(*shape: int) -> Draw:
    """Normal along the last dimension, constant along the others: strides of 0 if `expanded`."""
    return Draw(shape, "row")


def indices(*shape: int, high: int) -> Draw:
    """Integers from 0, `high` excluded; they may repeat."""
    return Draw(shape, "indices", high=high)


def permuted(*shape: int, high: int) -> Draw:
    """Such integers, none of them twice along the first dimension."""
    return Draw(shape, "permuted", high=high)


def flags(*shape: int) -> Draw:
    """Booleans, three of five true."""
    return Draw(shape, "flags")


def exact(values: Any) -> Draw:
    """These values, as nested lists: kinks and ties, decided on purpose."""
    return Draw(tuple(torch.tensor(values).shape), "exact", values=values)


@dataclass(frozen=True)
class PlainOperator:
    """A plain differentiable operator.

    Attributes:
        name: in reports and files.
        function: of tensors and attributes by name; it returns a tensor, or several by name.
        outputs: their names, in order.
        about: what a reimplementation should know beside torch's documentation of the name.
    """

    name: str
    function: Callable[..., Any]
    outputs: tuple[str, ...] = ("output",)
    about: str = ""


@dataclass(frozen=True)
class PlainCase:
    """One set of inputs of a plain operator; dtype and seed are open.

    Attributes:
        name: unique within the operator.
        operator: whose it is.
        tensors: the inputs, by the name of the argument.
        attributes: the other arguments: numbers, texts, lists of integers.
        shared: arguments that are an input once more, by name: its gradient is a sum.
        layout: of floating inputs and of cotangents in memory: `contiguous`; `transposed`, the
            dimensions in reverse order; `sliced`, every second element of a larger buffer;
            `expanded`, stride 0 wherever the values are constant, as all cotangents are then along
            every dimension but the last.
        note: what the case decides on purpose.
        dtypes: that floating tensors may have.
    """

    name: str
    operator: str
    tensors: Mapping[str, Draw]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    layout: Layout = "contiguous"
    note: str = ""
    dtypes: tuple[torch.dtype, ...] = FLOATING

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that may have a gradient."""
        return tuple(name for name, draw in self.tensors.items() if draw.floating)

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        """The tensors by name, contiguous; the same arguments give the same bits."""
        return {n: d.make(dtype, self._generator(n, seed)) for n, d in self.tensors.items()}

    def cotangent(self, output: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
        """The cotangent of an output of that shape, contiguous; see `layout` for its values."""
        constant = self.layout == "expanded" and len(shape) > 1
        draw = Draw(tuple(shape), "row" if constant else "normal")
        return draw.make(dtype, self._generator(f"cotangent/{output}", seed))

    def _generator(self, name: str, seed: int) -> torch.Generator:
        # One for each tensor, so that a change to one leaves the others as they are.
        # Torch's generator reads 32 bits of a seed.
        key = zlib.crc32(f"{seed}/{self.operator}/{self.name}/{name}".encode())
        return torch.Generator().manual_seed(key)

    def arguments(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """What the operator's function is called with."""
        again = {argument: tensors[name] for argument, name in self.shared.items()}
        return {**tensors, **again, **self.attributes}
