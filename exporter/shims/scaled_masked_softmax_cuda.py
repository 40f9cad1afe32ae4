"""Stands in for `scaled_masked_softmax_cuda`, an extension of apex and Megatron-LM."""

from torch import Tensor

from fuseport.exporter.shims import _softmax

__all__ = ["backward", "forward", "get_batch_per_block"]

_BLOCK, _WARP = 128, 32  # threads


def forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """softmax(scale_factor · input) without what mask hides; see `_softmax.masked`."""
    return _softmax.masked(input, mask, scale_factor)


def backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """The gradient of input, by that of the result."""
    return _softmax.gradient(output_grads, softmax_results, scale_factor)


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """How many rows of `key_seq_len` a block of threads has, by which code decides."""
    warp = next((w for w in (1, 2, 4, 8, 16) if key_seq_len <= w), _WARP)
    return _BLOCK // warp * (2 if key_seq_len <= _BLOCK else 1)
