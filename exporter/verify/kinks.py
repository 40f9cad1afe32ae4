"""Both sides of a kink, where rounding decides on which a value comes to lie.

The derivative of `relu` and its kin jumps at zero. What is computed to within a rounding of zero
may lie on either side of it, in two computations that are equally good; the gradients of all that
comes before then differ by far more than by rounding. By how much is known for each such value: by
that alone, and for all tensors together, can a result be explained.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["MOST", "Flipped", "Near", "Sampled", "chosen"]

MOST = 32
"""How many values are put on their other side, each by itself, those nearest to a kink."""

_KINKS = {
    "__abs__", "abs", "abs_", "absolute", "leaky_relu", "leaky_relu_", "prelu", "relu", "relu6",
    "relu_", "rrelu", "rrelu_", "selu", "selu_",
}  # fmt: skip
"""Functions of which the derivative jumps at zero."""

_SAMPLED = 4096  # values of a function's input
_LARGEST = 4.0  # an error, in units of the largest that is seen among these

Place = tuple[int, int]
"""The number of a call of such a function, and of a value in its input."""


class _Inputs(TorchFunctionMode):
    """Sees the input of each such function, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _KINKS and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            x, *others = args
            in_place = name.endswith("_") and not name.endswith("__")
            in_place |= bool(kwargs.get("inplace")) or any(other is True for other in others)
            args = (self.seen(self._calls, x, in_place=in_place), *others)
            self._calls += 1
        return func(*args, **kwargs)

    def seen(self, call: int, x: Tensor, *, in_place: bool) -> Tensor:
        """What the function gets in place of `x`."""
        raise AssertionError("of a subclass")


class Sampled(_Inputs):
    """Keeps some of the values.

    Attributes:
        samples: of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Tensor] = []

    def seen(self, call: int, x: Tensor, *, in_place: bool) -> Tensor:
        """The same."""
        self.samples.append(_sample(x).clone())
        return x


class Near(_Inputs):
    """Finds the values that lie as near to zero as rounding goes.

    Args:
        samples: of a computation whose inputs were moved within a rounding.
    """

    def __init__(self, samples: Sequence[Tensor]) -> None:
        super().__init__()
        self._samples = samples
        self._found: list[tuple[float, Place]] = []

    def places(self) -> list[Place]:
        """Those found, the nearest first."""
        return [place for _, place in sorted(self._found)]

    def seen(self, call: int, x: Tensor, *, in_place: bool) -> Tensor:
        """The same."""
        sample = _sample(x)
        if not sample.numel() or call >= len(self._samples):
            return x
        before = self._samples[call]
        if before.shape == sample.shape:
            values = x.detach().reshape(-1)
            error = float(_LARGEST * (sample - before).abs().max())
            # Zeros are what an earlier function or a padding made of them, whatever is rounded.
            near = ((values != 0) & (values.abs() <= error)).nonzero().view(-1)
            for index in near.tolist():
                self._found.append((abs(float(values[index])) / error, (call, index)))
        return x


class Flipped(_Inputs):
    """Puts one value on its other side."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def seen(self, call: int, x: Tensor, *, in_place: bool) -> Tensor:
        """The same but for that value."""
        if call != self._place[0]:
            return x
        shift = torch.zeros(x.numel(), dtype=x.dtype)
        shift[self._place[1]] = -2 * x.detach().reshape(-1)[self._place[1]]
        shift = shift.view(x.shape)
        return x.add_(shift) if in_place else x + shift


def chosen(off: Tensor, jumps: Sequence[Tensor]) -> list[int]:
    """The jumps that what is off is made of, the largest first.

    Each is taken whole or not at all, while that leaves less.

    Args:
        off: (elements,) of float64, in units of what is allowed.
        jumps: each as `off`.
    """
    taken: list[int] = []
    while True:
        gains = {
            number: float(2 * (off @ jump) - jump @ jump)
            for number, jump in enumerate(jumps)
            if number not in taken
        }
        best = max(gains, key=lambda number: gains[number], default=None)
        if best is None or gains[best] <= 0:
            return taken
        off = off - jumps[best]
        taken.append(best)


def _sample(x: Tensor) -> Tensor:
    values = x.detach()
    return values.reshape(-1)[:: max(1, values.numel() // _SAMPLED)]
