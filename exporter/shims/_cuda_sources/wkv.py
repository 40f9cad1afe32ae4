"""The mixers of RWKV in torch, with the arguments of their CUDA extensions, by functions of ops.

Sources: B. Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, of version 4,
"Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024, of 5 and 6, and
"RWKV-7 'Goose' with Expressive Dynamic State Evolution", 2025, of 7; Y. Duan et al., "Vision-RWKV",
2024, of those that look both ways; and the kernels that come with these.

b batch, l length, C channels, H heads of N.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.ops.dplr_delta_rule import dplr_delta_rule
from fuseport.ops.selective_scan import selective_scan

__all__ = ["FAMILIES", "Family", "Form"]

Named = Mapping[str, Any]

_LEAST = 1e-300  # of a sum that is divided by, in float64


def _plain(uniform: Tensor) -> Tensor:
    return 4 * uniform - 2


@dataclass(frozen=True)
class Form:
    """What an extension may compute.

    Attributes:
        what: it is, for messages.
        compute: of the arguments by their names, sizes and tensors in the shapes of the family,
            the result.
        shapes: of inputs, where they are not those of the family.
        draws: of inputs, values to try by their names, of numbers from 0 to 1.
        others: what a backward takes beside, by their names, of the arguments.
        rough: how much gradients may differ, of the largest, by their names, where a backward is
            not that of the forward.
    """

    what: str
    compute: Callable[[Named], Tensor]
    shapes: Mapping[str, str] = field(default_factory=dict)
    draws: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    others: Mapping[str, Callable[[Named], Tensor]] = field(default_factory=dict)
    rough: Mapping[str, float] = field(default_factory=dict)

    def draw(self, name: str, uniform: Tensor) -> Tensor:
        return self.draws.get(name, _plain)(uniform)


@dataclass(frozen=True)
class Family:
    """Extensions whose functions take the same.

    Attributes:
        parameters: of the function forward, by their names.
        shapes: of its inputs, each a letter for a size: B, T, C, H, N.
        forms: what such extensions compute, in the order in which they are tried.
        saved: shapes of what forward writes for backward, which is nothing here; P is for what is
            there of every 16 steps.
    """

    parameters: tuple[str, ...]
    shapes: Mapping[str, str]
    forms: tuple[Form, ...]
    saved: Mapping[str, str] = field(default_factory=dict)


def averaged(given: Named) -> Tensor:
    """WKV of version 4: of what came before, and of the step itself, the mean of v, weighted by
    exp(k) with a decay of exp(w) for each step between, and by exp(u + k).

    In float64, with one shift for all steps: a running maximum, which kernels in float32 need,
    would make of a channel's decay one of each step.

    Args:
        given: w (C,), u (C,), k (b, l, C), v (b, l, C).
    """
    w, u, k, v = (given[name].double() for name in ("w", "u", "k", "v"))
    top = k.detach().amax(1, keepdim=True)
    before = _summed(_weighted(k - top, v), w.repeat(2))
    return _mean(before, top, u + k, v).to(wide(given["k"]))


def averaged_both_ways(given: Named, *, parts: int) -> Tensor:
    """The same of what comes before and after, with a decay of exp(-w) for each step between, as
    Vision-RWKV's kernels have it.

    These go through the sequence in parts. From one part to another a step of decay comes on top,
    as it does to all that comes after; and of that a step is taken away when it has come, with a
    decay of one step too little, so that exp(-w) - 1 of it is left. Where w is that of an image,
    divided by the number of its patches, all this is small.

    Args:
        given: w (C,), u (C,), k (b, l, C), v (b, l, C).
        parts: ⌈l/parts⌉ steps are a part.
    """
    w, u, k, v = (given[name].double() for name in ("w", "u", "k", "v"))
    top = k.detach().amax(1, keepdim=True)
    added = _weighted(k - top, v)
    rate = w.repeat(2)
    before, after = _summed(torch.cat([added, added.flip(1)]), -rate).chunk(2)
    steps = torch.arange(k.shape[1], device=k.device)
    size = (k.shape[1] + parts - 1) // parts
    begins = steps // size * size
    passed = (steps - begins).unsqueeze(1) * rate
    earlier = before.index_select(1, begins) * (-passed).exp()  # than the part
    come = _come(added * (steps != begins).unsqueeze(1), rate, parts, size)
    others = before + (after.flip(1) + earlier) * (-rate).exp() - earlier - come * rate.expm1()
    own = _weighted(u + k - top, v)
    weighted, weights = (others + own).chunk(2, 2)
    mean: Tensor = weighted / weights
    return mean.to(wide(given["k"]))


def _come(x: Tensor, w: Tensor, parts: int, size: int) -> Tensor:
    """s_t = exp(w)·s_{t-1} + x_t, of x (b, l, d) and w (d,), each part of `size` by itself."""
    length = x.shape[1]
    split = F.pad(x, (0, 0, 0, parts * size - length)).reshape(-1, size, x.shape[2])
    summed = w.exp() * _summed(split, w) + split
    return summed.reshape(x.shape[0], parts * size, -1)[:, :length]


def _weighted(k: Tensor, v: Tensor) -> Tensor:
    """(b, l, 2C): v with weights exp(k), and these."""
    weight = k.exp()
    return torch.cat([weight * v, weight], 2)


def _mean(others: Tensor, top: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean of v, with a weight of exp(k), and of others: their sums, as of `_weighted`, by
    exp(top) smaller than they are."""
    weighted, weights = others.chunk(2, 2)
    weights = weights.clamp(min=_LEAST)
    share = (weights.log() + top - k).sigmoid()
    return v + share * (weighted / weights - v)


def _summed(x: Tensor, w: Tensor) -> Tensor:
    """s_t = exp(w)·s_{t-1} + x_{t-1}, of x (b, l, d) and w (d,); nothing at first."""
    turned = F.pad(x, (0, 0, 1, 0))[:, :-1].transpose(1, 2)
    one = torch.ones((x.shape[0], 1, x.shape[1]), dtype=x.dtype, device=x.device)
    summed: Tensor = selective_scan(turned, one.expand_as(turned), w.unsqueeze(1), one, one)
    return summed.transpose(1, 2)


def mixed(
    given: Named, decay: Callable[[Tensor], Tensor], *, both: bool = False, state: bool = False
) -> Tensor:
    """WKV of versions 5 and 6: o_t = r_tᵀ(S_{t-1} + (u ∘ k_t) v_tᵀ) with a decay for each key
    channel, S_t = diag(d_t)·S_{t-1} + k_t v_tᵀ.

    Args:
        given: r, k, v (b, l, C); w (C,) or (b, l, C); u (C,); s (b, H, N, N), values first.
        decay: of w, the decay's logarithm.
        both: a second state, without u, comes from the end.
        state: s is the state before the first step.
    """
    real = wide(given["r"])
    shape = (given["B"], given["T"], given["H"], given["C"] // given["H"])
    r, k, v = (given[name].to(real).reshape(shape) for name in ("r", "k", "v"))
    w = decay(given["w"].to(real))
    w = w.reshape(*w.shape[:-1], *shape[2:]).expand_as(k)
    sides = [torch.cat([t, t.flip(1)]) if both else t for t in (r, k, v, w)]
    # With a step of nothing at the front, each finds the state before it.
    read = F.pad(sides[0], (0, 0, 0, 0, 0, 1))
    key, value, left = (F.pad(t, (0, 0, 0, 0, 1, 0)) for t in sides[1:])
    none = torch.zeros_like(key)
    initial = given["s"].to(real).mT if state else None
    out = dplr_delta_rule(read, key, value, none, none, left, 1.0, initial)[0][:, :-1]
    if both:
        out = out[: shape[0]] + out[shape[0] :].flip(1)
    own = (r * given["u"].to(real).reshape(shape[2:]) * k).sum(-1, keepdim=True)
    every: Tensor = out + own * v
    return every.flatten(2)


def corrected(given: Named, decay: Callable[[Tensor], Tensor], names: Sequence[str]) -> Tensor:
    """WKV of version 7, `dplr_delta_rule` with a scale of 1.

    Args:
        given: tensors of (b, l, C), or (b, l, H, N).
        decay: of w, the decay's logarithm.
        names: those of the rule's q, k, v, a and b.
    """
    real = wide(given["w"])
    shape = (given["B"], given["T"], given["H"], -1)
    q, k, v, a, b = (given[name].to(real).reshape(shape) for name in names)
    w = decay(given["w"].to(real)).reshape(shape)
    out: Tensor = dplr_delta_rule(q, k, v, a, b, w, 1.0)[0]
    return out.flatten(2)


def _of_exponential(w: Tensor) -> Tensor:
    return w.clamp(min=torch.finfo(w.dtype).tiny).log()


def _twice_exponential(w: Tensor) -> Tensor:
    return -w.exp()


_Of = Callable[[Any], Tensor]
_MIXED: tuple[tuple[str, _Of, _Of, Mapping[str, _Of]], ...] = (
    # What decays are, their logarithm, values to try, and what a backward takes beside.
    ("exp(-exp(w))", _twice_exponential, lambda x: 3 * x - 3, {}),
    ("exp(w)", lambda w: w, lambda x: -0.05 - x, {}),
    ("w", _of_exponential, lambda x: 0.3 + 0.65 * x, {"ww": lambda given: given["w"].log()}),
)


def _mixers(number: int, w: str, **options: Any) -> tuple[Form, ...]:
    ways = ", both ways" if options.get("both") else ""
    return tuple(
        Form(
            f"RWKV-{number}'s WKV with decays {what}{ways}",
            partial(mixed, decay=decay, **options),
            {"w": w},
            {"w": values},
            others,
        )
        for what, decay, values, others in _MIXED
    )


_CLAMPED = math.exp(-0.5)


def _correctors(*names: str) -> tuple[Form, ...]:
    """Forms of version 7, whose kernels go back by dividing by decays: these are near 1."""
    draws = {name: lambda x: 0.6 * x - 0.3 for name in names[3:]} | {"w": lambda x: 1.5 * x - 3}
    return tuple(
        Form(f"RWKV-7's WKV with decays {what}", partial(corrected, decay=decay, names=names),
             draws=draws)
        for what, decay in (
            ("exp(-exp(w))", _twice_exponential),
            ("exp(-exp(-0.5)·sigmoid(w))", lambda w: -_CLAMPED * w.sigmoid()),
        )
    )  # fmt: skip


_AVERAGED = {"w": "C", "u": "C", "k": "BTC", "v": "BTC"}
_BOTH_WAYS = tuple(
    Form(
        f"Vision-RWKV's WKV in {parts} parts",
        partial(averaged_both_ways, parts=parts),
        draws={"w": lambda x: x / 64},
        rough={"k": 0.05, "v": 0.05},  # by the other count of steps that it has
    )
    for parts in (32, 64)
)
_STEPS = {"r": "BTC", "k": "BTC", "v": "BTC", "w": "BTC", "u": "C"}

_SAVED = {"s": "BHPNN", "sa": "BTHN"}

FAMILIES = (
    Family(
        ("B", "T", "C", "w", "u", "k", "v", "y"),
        _AVERAGED,
        (
            Form("RWKV-4's WKV", averaged, draws={"w": lambda x: -x}),
            *_BOTH_WAYS,
        ),
    ),
    Family(("w", "u", "k", "v"), _AVERAGED, _BOTH_WAYS),
    Family(
        ("B", "T", "C", "H", "r", "k", "v", "w", "u", "y"),
        _STEPS,
        (*_mixers(6, "BTC"), *_mixers(6, "BTC", both=True), *_mixers(5, "C")),
    ),
    Family(
        ("B", "T", "C", "H", "r", "k", "v", "w", "u", "s", "y"),
        {**_STEPS, "s": "BHNN"},
        _mixers(6, "BTC", state=True),
    ),
    Family(
        ("w", "q", "k", "v", "z", "a", "y", "s", "sa"),
        dict.fromkeys("wqkvza", "BTHN"),
        _correctors("q", "k", "v", "z", "a"),
        _SAVED,
    ),
    Family(
        ("r", "w", "k", "v", "a", "b", "y", "s", "sa"),
        dict.fromkeys("rwkvab", "BTHN"),
        _correctors("r", "k", "v", "a", "b"),
        _SAVED,
    ),
    Family(
        ("B", "T", "C", "H", "r", "w", "k", "v", "a", "b", "y"),
        dict.fromkeys("rwkvab", "BTC"),
        _correctors("r", "k", "v", "a", "b"),
    ),
)
