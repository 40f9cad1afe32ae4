"""The mixers of RWKV in torch, with the arguments of their CUDA extensions, by functions of ops.

Source: B. Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, of version 4, and
"Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024, of 5 and 6; Y. Duan
et al., "Vision-RWKV", 2024, of those that look both ways. b batch, l length, H heads of N channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._fla.decays import rwkv6
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
    """

    parameters: tuple[str, ...]
    shapes: Mapping[str, str]
    forms: tuple[Form, ...]


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
    sides = torch.cat([added, added.flip(1), added], 2)
    before, after, grown = _summed(sides, torch.cat([-rate, -rate, rate])).chunk(3, 2)
    steps = torch.arange(k.shape[1], device=k.device)
    size = (k.shape[1] + parts - 1) // parts
    begins = steps // size * size
    passed = (steps - begins).unsqueeze(1) * rate
    earlier = before.index_select(1, begins) * (-passed).exp()  # than the part
    come = rate.exp() * grown + added
    come = come - come.index_select(1, begins) * passed.exp()
    others = before + (after.flip(1) + earlier) * (-rate).exp() - earlier - come * rate.expm1()
    own = _weighted(u + k - top, v)
    weighted, weights = (others + own).chunk(2, 2)
    mean: Tensor = weighted / weights
    return mean.to(wide(given["k"]))


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
    b, length, heads = given["B"], given["T"], given["H"]
    real = wide(given["r"])
    r, k, v = (given[name].to(real).reshape(b, length, heads, -1) for name in ("r", "k", "v"))
    w = decay(given["w"].to(real)).reshape(*given["w"].shape[:-1], heads, -1)
    w, u = w.expand_as(k), given["u"].to(real).reshape(heads, -1)
    initial = given["s"].to(real).mT if state else None
    out, _ = rwkv6(r, k, v, w, u, 1.0, initial)
    if both:
        r, k, v, w = (t.flip(1) for t in (r, k, v, w))
        out = out + rwkv6(r, k, v, w, torch.zeros_like(u), 1.0)[0].flip(1)
    return out.flatten(2)


def _of_exponential(w: Tensor) -> Tensor:
    return w.clamp(min=torch.finfo(w.dtype).tiny).log()


_Of = Callable[[Any], Tensor]
_MIXED: tuple[tuple[str, _Of, _Of, Mapping[str, _Of]], ...] = (
    # What w is, the decay's logarithm of it, values to try, and what a backward takes beside.
    ("exp(-exp(w))", lambda w: -w.exp(), lambda x: 3 * x - 3, {}),
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
)
