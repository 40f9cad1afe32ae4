"""The functions of `flash_attn`, without in-place writes and for any sizes.

Steps come before heads: (batch, steps, heads, channels), or (all steps, heads, channels) of packed
sequences. What each argument means is said of `Options`; `deterministic` has no effect.
"""

from typing import Any, NoReturn

from torch import Tensor

from ._attention import Options, attend, attend_packed

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_ALL = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of (b, l, h, d) to (b, m, g, d), g a divisor of h: (b, l, h, d).

    Returns:
        The result; with `return_attn_probs` also the logarithm of each row's sum of exponentials,
        (b, h, l), float32 or wider, and an empty tensor, as there is no dropout.

    Raises:
        ValueError: dropout_p is above 0, or shapes do not fit.
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return attend(q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of keys and values in one tensor, (b, m, 2, g, d)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return attend(q, kv[:, :, 0], kv[:, :, 1], options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of all three in one tensor, (b, l, 3, h, d)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention within packed sequences, of (n, h, d) to (m, g, d), g a divisor of h: (n, h, d).

    Args:
        q: (n, h, d).
        k: (m, g, d).
        v: (m, g, d).
        cu_seqlens_q: (b + 1,), int32: where each sequence begins in q, and the end of the last.
        cu_seqlens_k: (b + 1,), the same in k and v.
        max_seqlen_q: not needed here.
        max_seqlen_k: not needed here.
        dropout_p: must be 0.
        softmax_scale: None for 1/√d.
        causal: a query sees no key after it; of each sequence the last of both are at one place.
        window_size: how far it sees back and ahead; -1 for to the end.
        softcap: c of c·tanh(score / c); 0 for none.
        alibi_slopes: (h,) or (b, h), float32, or None.
        deterministic: has no effect.
        return_attn_probs: as in `flash_attn_func`; sums are (h, n).
        block_table: must be None.

    Raises:
        NotImplementedError: block_table is given.
        ValueError: dropout_p is above 0, or shapes do not fit.
    """
    if block_table is not None:
        raise NotImplementedError("fuseport's stand-in for flash_attn has no paged keys")
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of keys and values in one tensor, (m, 2, g, d)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return attend_packed(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of all three in one tensor, (n, 3, h, d)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return attend_packed(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, options)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: it decodes, and writes keys and values to a cache in place."""
    raise NotImplementedError(
        "flash_attn_with_kvcache was called on fuseport's stand-in, which keeps no cache of keys: "
        "export a forward over the whole sequence, which calls flash_attn_func"
    )
