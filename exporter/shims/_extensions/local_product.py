"""Stands in for `local_product_cpu` and `local_product_cuda`, of idiap/fast-transformers.

Of c places in a window, the one in the middle, c // 2, is of the query's own step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._gradients import differentiated

__all__ = [
    "local_dot_backward",
    "local_dot_product",
    "local_weighted_average",
    "local_weighted_average_backward",
]

_OUTSIDE = -1e24
"""The score of a place that there is no key at."""


def local_dot_product(
    queries: Tensor, keys: Tensor, attn_mask: Tensor, key_lengths: Tensor, local_context: int
) -> Tensor:
    """Scores of the keys around each query, (b, h, l, c), -1e24 where there is none.

    Args:
        queries: (b, h, l, e).
        keys: (b, h, s, e).
        attn_mask: (l, s), added.
        key_lengths: (b,), integers: how many keys there are.
        local_context: c.
    """
    scores = _dots(queries, keys, local_context)
    steps = torch.arange(queries.shape[2], device=queries.device).unsqueeze(1)
    places = steps + torch.arange(local_context, device=queries.device) - local_context // 2
    added = attn_mask.to(scores.dtype).gather(1, places.clamp(0, keys.shape[2] - 1))
    there = (places >= 0) & (places < key_lengths.reshape(-1, 1, 1))
    return (scores + added).masked_fill(~there.unsqueeze(1), _OUTSIDE)


def local_dot_backward(
    queries: Tensor, keys: Tensor, key_lengths: Tensor, grad: Tensor, local_context: int
) -> tuple[Tensor, Tensor]:
    """The gradients of queries and keys."""
    nothing = queries.new_zeros(queries.shape[2], keys.shape[2])

    def scores(queries: Tensor, keys: Tensor) -> Tensor:
        return local_dot_product(queries, keys, nothing, key_lengths, local_context)

    of_queries, of_keys = differentiated(scores, (queries, keys), grad)
    return of_queries, of_keys


def local_weighted_average(attention: Tensor, values: Tensor) -> Tensor:
    """Sums of the values around each step, (b, h, l, e), by weights, (b, h, l, c).

    `values` are (b, h, s, e); outside of them there is nothing.
    """
    around = _windows(values, attention.shape[2], attention.shape[3])  # (b, h, l, e, c)
    return (around @ attention.unsqueeze(-1)).squeeze(-1)


def local_weighted_average_backward(
    attention: Tensor, values: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of weights and values."""
    of_weights, of_values = differentiated(local_weighted_average, (attention, values), grad)
    return of_weights, of_values


def _dots(queries: Tensor, keys: Tensor, context: int) -> Tensor:
    around = _windows(keys, queries.shape[2], context)
    return (queries.unsqueeze(-2) @ around).squeeze(-2)


def _windows(x: Tensor, steps: int, context: int) -> Tensor:
    """What is around each of so many steps, (b, h, steps, e, context), zero outside of x."""
    before = context // 2
    behind = steps - x.shape[2] + context - 1 - before
    return F.pad(x, (0, 0, before, behind)).unfold(2, context, 1)
