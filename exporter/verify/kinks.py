"""Both sides of a kink, where rounding decides on which a value comes to lie.

The derivative of `relu` and its kin jumps at zero, that of a clamp at its bounds, that of a
maximum, a median or an order where two values are alike. What is within a rounding of that may lie
on either side of it, in two computations that are equally good; the gradients of all that comes
before then differ by far more than by rounding. By how much is known for each such value: by that
alone, and for all tensors together, can a result be explained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["MOST", "Flipped", "Gaps", "Near", "Place", "Sampled", "chosen", "likeliest"]

MOST = 32
"""How many values are put on their other side, each by itself."""

_SAMPLED = 4096  # values of a function's input
_LARGEST = 4.0  # an error, in units of the largest that is seen among these

Place = tuple[int, int, int]
"""The number of a call of such a function, of one of its kinks, and of a value's gap from that."""


@dataclass(frozen=True)
class _Kink:
    """Where a function's derivative jumps.

    Attributes:
        gaps: flat; what is zero at the kink, and changes its sign there with the values at fault.
        owners: which value of the function's first input that is, of each; None: of its own number.
    """

    gaps: Tensor
    owners: Tensor | None = None


def _at(*bounds: float) -> Callable[..., list[_Kink]]:
    return lambda x, *_, **__: [_Kink((x - bound).reshape(-1)) for bound in bounds]


def _clamp(x: Tensor, min: Any = None, max: Any = None, **_: Any) -> list[_Kink]:
    bounds = (bound for bound in (min, max) if bound is not None)
    found = (x - (bound.detach() if isinstance(bound, Tensor) else bound) for bound in bounds)
    return [_Kink(gap.reshape(-1)) for gap in found if gap.shape == x.shape]


def _hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, *_: Any, **__: Any) -> Any:
    return _clamp(x, min_val, max_val)


def _of_two(x: Tensor, other: Any, **_: Any) -> list[_Kink]:
    gap = x - other.detach()
    return [_Kink(gap.reshape(-1))] if gap.shape == x.shape else []


def _largest(sign: float) -> Callable[..., list[_Kink]]:
    """Of a maximum over dimensions, or for -1 a minimum; or of two tensors."""

    def found(x: Tensor, dim: Any = None, *_: Any, other: Any = None, **__: Any) -> list[_Kink]:
        if isinstance(dim, Tensor) or isinstance(other, Tensor):
            return _of_two(x, dim if isinstance(dim, Tensor) else other)
        dims = tuple(range(x.dim())) if dim is None or dim == () else _each(dim, 1)
        if not dims:
            return []
        last = tuple(range(-len(dims), 0))
        values, numbers = (t.movedim(dims, last).flatten(-len(dims)) for t in (x, _numbers(x)))
        return _nearest_two(values, numbers, sign)

    return found


def _pool(dims: int) -> Callable[..., list[_Kink]]:
    """Of a maximum over windows, without a dilation."""

    def found(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        *_: Any,
        **__: Any,
    ) -> list[_Kink]:
        if set(_each(dilation, dims)) != {1}:
            return []
        sizes, steps = _each(kernel_size, dims), _each(stride or kernel_size, dims)
        around = [pad for pad in reversed(_each(padding, dims)) for _ in range(2)]

        def windows(values: Tensor, beyond: float) -> Tensor:
            values = F.pad(values, around, value=beyond)
            for dim, (size, step) in enumerate(zip(sizes, steps, strict=True), x.dim() - dims):
                values = values.unfold(dim, size, step)
            return values.flatten(-dims)

        return _nearest_two(windows(x, -torch.inf), windows(_numbers(x), -1), 1.0)

    return found


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * dims


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).view(x.shape)


def _nearest_two(rows: Tensor, numbers: Tensor, sign: float) -> list[_Kink]:
    """Of the largest in each row, by its distance from the next; or for -1 of the smallest."""
    if rows.shape[-1] < 2:
        return []
    values, places = (sign * rows).topk(2)
    gaps = sign * (values[..., 0] - values[..., 1])
    return [_Kink(gaps.reshape(-1), numbers.gather(-1, places[..., :1]).reshape(-1))]


def _sorted(x: Tensor, dim: int = -1, descending: bool = False, **_: Any) -> list[_Kink]:
    """Of each value in order by its distance from the next; the last has none."""
    return _neighbours(x, dim, x.shape[dim] if x.dim() else 1, largest=descending)


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any
) -> list[_Kink]:
    """The same of the first k."""
    return _neighbours(x, dim, k, largest=largest)


def _neighbours(x: Tensor, dim: int, count: int, *, largest: bool) -> list[_Kink]:
    if not x.dim():
        return []
    values, places = x.movedim(dim, -1).sort(descending=largest)
    none = values.new_full((*values.shape[:-1], 1), torch.inf)
    gaps = torch.cat([values[..., :-1] - values[..., 1:], none], -1)[..., :count]
    owners = _numbers(x).movedim(dim, -1).gather(-1, places)[..., :count]
    in_place = [t.movedim(-1, dim).reshape(-1) for t in (gaps, owners)]
    return [_Kink(*in_place)]


def _kthvalue(x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> list[_Kink]:
    """Of the k-th smallest, by its distances from that before it and from the next."""
    if not x.dim():
        return []
    values, places = x.movedim(dim, -1).sort()
    owners = _numbers(x).movedim(dim, -1).gather(-1, places)[..., k - 1].reshape(-1)
    others = [n for n in (k - 2, k) if 0 <= n < values.shape[-1]]
    return [_Kink((values[..., k - 1] - values[..., n]).reshape(-1), owners) for n in others]


def _median(x: Tensor, dim: int | None = None, *_: Any, **__: Any) -> list[_Kink]:
    """The same of the lower of those in the middle."""
    if dim is None:
        return _kthvalue(x.reshape(-1), (x.numel() + 1) // 2) if x.numel() else []
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim) if x.dim() else []


_KINKS: dict[str, Callable[..., list[_Kink]]] = {
    **dict.fromkeys(
        (
            "__abs__", "abs", "abs_", "absolute", "leaky_relu", "leaky_relu_", "prelu", "relu",
            "relu_", "rrelu", "rrelu_", "selu", "selu_",
        ),
        _at(0.0),
    ),
    **dict.fromkeys(("relu6", "relu6_"), _at(0.0, 6.0)),
    **dict.fromkeys(("hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_"), _at(-3.0, 3.0)),
    **dict.fromkeys(("clamp", "clamp_", "clip", "clip_"), _clamp),
    **dict.fromkeys(("clamp_min", "clamp_min_"), _clamp),
    **dict.fromkeys(("clamp_max", "clamp_max_"), lambda x, max: _clamp(x, None, max)),
    **dict.fromkeys(("hardtanh", "hardtanh_"), _hardtanh),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), _of_two),
    **dict.fromkeys(("max", "amax", "argmax"), _largest(1.0)),
    **dict.fromkeys(("min", "amin", "argmin"), _largest(-1.0)),
    **dict.fromkeys(("sort", "argsort"), _sorted),
    "msort": lambda x: _sorted(x, 0),
    "topk": _topk,
    "kthvalue": _kthvalue,
    "median": _median,
    **{
        f"max_pool{dims}d{suffix}": _pool(dims)
        for dims in (1, 2, 3)
        for suffix in ("", "_with_indices")
    },
}  # fmt: skip
"""Functions of which the derivative jumps, by name: what their kinks are, of their arguments."""


_WITH_INPLACE = {
    "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "relu", "relu6", "rrelu", "selu",
}  # fmt: skip
"""Those that may write to their input without being called so: what else is True there says it."""


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
            asked = bool(kwargs.get("inplace")) or any(other is True for other in others)
            in_place |= name in _WITH_INPLACE and asked
            kinks = _KINKS[name](x.detach(), *others, **kwargs)
            args = (self.seen(self._calls, x, kinks, in_place=in_place), *others)
            self._calls += 1
            result = func(*args, **kwargs)
            self.gave(self._calls - 1, result if isinstance(result, Tensor) else result[0])
            return result
        return func(*args, **kwargs)

    def seen(self, call: int, x: Tensor, kinks: Sequence[_Kink], *, in_place: bool) -> Tensor:
        """What the function gets in place of `x`."""
        raise AssertionError("of a subclass")

    def gave(self, call: int, y: Tensor) -> None:
        """What the function made of it, one value for each gap."""


class Sampled(_Inputs):
    """Keeps some of the gaps.

    Attributes:
        samples: of each call, of each of its kinks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[Tensor]] = []

    def seen(self, call: int, x: Tensor, kinks: Sequence[_Kink], *, in_place: bool) -> Tensor:
        """The same."""
        self.samples.append([_sample(kink.gaps).clone() for kink in kinks])
        return x


class Near(_Inputs):
    """Finds the values that lie as near to a kink as rounding goes.

    Args:
        samples: of a computation whose inputs were moved within a rounding.

    Attributes:
        gaps: of those found.
        slopes: of each, how much what is differentiated changes with what the function gives there;
            once it has been differentiated.
    """

    def __init__(self, samples: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self._samples = samples
        self._found: list[tuple[float, Place]] = []
        self.gaps: dict[Place, float] = {}
        self.slopes: dict[Place, float] = {}

    def places(self) -> list[Place]:
        """Those found, the nearest first."""
        return [place for _, place in sorted(self._found)]

    def seen(self, call: int, x: Tensor, kinks: Sequence[_Kink], *, in_place: bool) -> Tensor:
        """The same."""
        before = self._samples[call] if call < len(self._samples) else []
        for number, (kink, moved) in enumerate(zip(kinks, before, strict=False)):
            sample = _sample(kink.gaps)
            if moved.shape != sample.shape:
                continue
            off = (sample - moved).abs()
            off = off[off.isfinite()]
            if not off.numel():
                continue
            error = float(_LARGEST * off.max())
            # Zeros are what an earlier function or a padding made of them, whatever is rounded.
            near = ((kink.gaps != 0) & (kink.gaps.abs() <= error)).nonzero().view(-1)
            for index in near.tolist():
                place, gap = (call, number, index), float(kink.gaps[index])
                self._found.append((abs(gap) / error, place))
                self.gaps[place] = gap
        return x

    def gave(self, call: int, y: Tensor) -> None:
        """The same."""
        here = [place for place in self.gaps if place[0] == call and place[2] < y.numel()]
        if here and y.requires_grad:

            def keep(slope: Tensor) -> None:
                flat = slope.reshape(-1)
                self.slopes.update((place, float(flat[place[2]])) for place in here)

            y.register_hook(keep)


class Gaps(_Inputs):
    """Reads gaps again.

    Attributes:
        found: of each of the places.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self._places = places
        self.found: dict[Place, float] = {}

    def seen(self, call: int, x: Tensor, kinks: Sequence[_Kink], *, in_place: bool) -> Tensor:
        """The same."""
        for place in self._places:
            _, number, index = place
            if place[0] == call and number < len(kinks) and index < kinks[number].gaps.numel():
                self.found[place] = float(kinks[number].gaps[index])
        return x


class Flipped(_Inputs):
    """Puts one value on its other side."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def seen(self, call: int, x: Tensor, kinks: Sequence[_Kink], *, in_place: bool) -> Tensor:
        """The same but for that value."""
        wanted, number, index = self._place
        if call != wanted:
            return x
        kink = kinks[number]
        shift = torch.zeros(x.numel(), dtype=x.dtype)
        owner = index if kink.owners is None else int(kink.owners[index])
        shift[owner] = -2 * kink.gaps[index]
        shift = shift.view(x.shape)
        return x.add_(shift) if in_place else x + shift


def likeliest(near: Near, moved: Mapping[Place, float]) -> list[Place]:
    """The places that something off can best be made of, the best first.

    With J the derivative of a gap by parameters and inputs, and s the slope behind it, a jump is
    a multiple of s·Jᵀ: its product with what is off is one of s times the derivative of the gap
    along that.

    Args:
        near: after the gradients were computed.
        moved: the gaps where parameters and inputs are moved along what is off.
    """

    def product(place: Place) -> float:
        change = moved.get(place, near.gaps[place]) - near.gaps[place]
        return abs(near.slopes.get(place, 0.0) * change)

    return sorted(near.places(), key=product, reverse=True)


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


def _sample(gaps: Tensor) -> Tensor:
    return gaps[:: max(1, gaps.numel() // _SAMPLED)]
