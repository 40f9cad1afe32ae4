"""Stands in for `causal_product_cpu` and `causal_product_cuda`, of idiap/fast-transformers.

A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", 2020, equation 9. It is the state space duality's scan of a decay of one, and so an op.
"""

import torch
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._gradients import differentiated
from fuseport.ops.ssd_chunk_scan import ssd_discrete

__all__ = ["causal_dot_backward", "causal_dot_product"]


def causal_dot_product(queries: Tensor, keys: Tensor, values: Tensor, product: Tensor) -> None:
    """Writes y_l = Σ_{j ≤ l} (q_l · k_j) v_j to product, (b, h, l, m).

    Args:
        queries: (b, h, l, e).
        keys: likewise.
        values: (b, h, l, m).
        product: room for the result.
    """
    product.copy_(_product(queries, keys, values))


def causal_dot_backward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    grad_out: Tensor,
    grad_queries: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
) -> None:
    """Writes the gradients of queries, keys and values, by that of the product."""
    found = differentiated(_product, (queries, keys, values), grad_out)
    for room, gradient in zip((grad_queries, grad_keys, grad_values), found, strict=True):
        room.copy_(gradient)


def _product(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (queries, keys, values))
    kept = torch.zeros(v.shape[:3], dtype=wide(v), device=v.device)  # a decay's logarithm
    return ssd_discrete(v, kept, k, q)[0].transpose(1, 2)
