"""Functions of all versions from 0.14 on, under the names and with the arguments of each."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import _attention as own
from ._arguments import Several, Whether, axes_of, check_lengths, check_odd, read_call
from ._tiles import Axis
from .attn_merge import merge_attentions

__all__ = [
    "attention",
    "merge_attentions",
    "na1d",
    "na1d_av",
    "na1d_qk",
    "na1d_qk_with_bias",
    "na2d",
    "na2d_av",
    "na2d_qk",
    "na2d_qk_with_bias",
    "na3d",
    "na3d_av",
    "na3d_qk",
    "na3d_qk_with_bias",
    "natten1dav",
    "natten1dqk",
    "natten1dqkrpb",
    "natten2dav",
    "natten2dqk",
    "natten2dqkrpb",
    "natten3dav",
    "natten3dqk",
    "natten3dqkrpb",
    "neighborhood_attention_generic",
]


def neighborhood_attention_generic(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: Several, *args: Any, **kwargs: Any
) -> Any:
    """Attention of each query to its neighborhood, of as many dimensions as there are.

    Args:
        query: (b, L…, h, d), of a floating dtype.
        key: (b, L…, g, d), g a divisor of h.
        value: (b, L…, g, e).
        kernel_size: keys of a window, 2 at least; one for all dimensions, or one of each.
        args: as `kwargs`, in the order of a version's; those that two versions read as different
            sizes are refused.
        kwargs: `stride`, of how many queries the windows are one; `dilation`, how far apart their
            keys are; `is_causal`, whether a query sees no key after it; `scale`, of the scores;
            `rpb`, (h, (2k - 1)…), biases of relative places; `additional_keys`, (b, m, g, d), and
            `additional_values`, which all queries see; `return_lse`. Others, of the kernels, have
            no effect.

    Returns:
        (b, L…, h, e), in query's dtype; with `return_lse` after it the logarithm of each query's
        sum, (b, L…, h), float32 or float64.

    Raises:
        TypeError: sizes by their place mean two things.
        ValueError: sizes or shapes do not fit each other.
        NotImplementedError: biases are to be with causality, which natten does not define.
    """
    return _attended("neighborhood_attention_generic", query, key, value, kernel_size, args, kwargs)


def na1d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: Several, *args: Any, **kwargs: Any
) -> Any:
    """`neighborhood_attention_generic` of (b, l, h, d)."""
    _check_rank("na1d", query, 4)
    return _attended("na1d", query, key, value, kernel_size, args, kwargs)


def na2d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: Several, *args: Any, **kwargs: Any
) -> Any:
    """`neighborhood_attention_generic` of (b, x, y, h, d)."""
    _check_rank("na2d", query, 5)
    return _attended("na2d", query, key, value, kernel_size, args, kwargs)


def na3d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: Several, *args: Any, **kwargs: Any
) -> Any:
    """`neighborhood_attention_generic` of (b, x, y, z, h, d)."""
    _check_rank("na3d", query, 6)
    return _attended("na3d", query, key, value, kernel_size, args, kwargs)


def na1d_qk(
    query: Tensor,
    key: Tensor,
    kernel_size: Several,
    dilation: Several = 1,
    additional_keys: Tensor | None = None,
    is_causal: Whether = False,
    rpb: Tensor | None = None,
) -> Tensor:
    """Products of each query with the keys of its window, which are not scaled.

    Args:
        query: (b, h, l, d), of a floating dtype.
        key: of query's shape.
        kernel_size: keys of a window, odd.
        dilation: how far apart they are.
        additional_keys: (b, h, m, d), which all queries see, or None.
        is_causal: whether a query sees no key after it.
        rpb: (h, 2k - 1), biases of relative places, or None.

    Returns:
        (b, h, l, k + m), -inf where a key is not seen.
    """
    return _scores("na1d_qk", 1, query, key, rpb, kernel_size, dilation, is_causal, additional_keys)


def na2d_qk(
    query: Tensor,
    key: Tensor,
    kernel_size: Several,
    dilation: Several = 1,
    additional_keys: Tensor | None = None,
    is_causal: Whether = False,
    rpb: Tensor | None = None,
) -> Tensor:
    """`na1d_qk` of (b, h, x, y, d): (b, h, x, y, k·k + m)."""
    return _scores("na2d_qk", 2, query, key, rpb, kernel_size, dilation, is_causal, additional_keys)


def na3d_qk(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`na1d_qk` of (b, h, x, y, z, d): (b, h, x, y, z, k·k·k + m).

    Arguments are those of `na1d_qk`, or of before 0.17: `kernel_size_d, kernel_size, dilation_d,
    dilation, additional_keys`.
    """
    if "kernel_size_d" in kwargs or (len(args) > 2 and isinstance(args[2], int)):
        return na3d_qk_with_bias(query, key, None, *args, **kwargs)
    return _scores_3d(query, key, *args, **kwargs)


def na1d_qk_with_bias(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size: int,
    dilation: int,
    additional_keys: Tensor | None = None,
) -> Tensor:
    """`na1d_qk` with `rpb`."""
    return na1d_qk(query, key, kernel_size, dilation, additional_keys, rpb=bias)


def na2d_qk_with_bias(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size: int,
    dilation: int,
    additional_keys: Tensor | None = None,
) -> Tensor:
    """`na2d_qk` with `rpb`."""
    return na2d_qk(query, key, kernel_size, dilation, additional_keys, rpb=bias)


def na3d_qk_with_bias(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size_d: int,
    kernel_size: int,
    dilation_d: int,
    dilation: int,
    additional_keys: Tensor | None = None,
) -> Tensor:
    """`na3d_qk` with `rpb`, sizes of the first dimension and of the others."""
    kernels = (kernel_size_d, kernel_size, kernel_size)
    dilations = (dilation_d, dilation, dilation)
    return _scores_3d(query, key, kernels, dilations, additional_keys, rpb=bias)


def na1d_av(
    attn: Tensor,
    value: Tensor,
    kernel_size: Several,
    dilation: Several = 1,
    additional_values: Tensor | None = None,
    is_causal: Whether = False,
) -> Tensor:
    """The values of each query's window, weighted.

    Args:
        attn: (b, h, l, k + m), as `na1d_qk` has them.
        value: (b, h, l, d).
        kernel_size: as `na1d_qk`'s.
        dilation: as `na1d_qk`'s.
        additional_values: (b, h, m, d), or None.
        is_causal: as `na1d_qk`'s.

    Returns:
        (b, h, l, d).
    """
    return _weighted("na1d_av", 1, attn, value, kernel_size, dilation, is_causal, additional_values)


def na2d_av(
    attn: Tensor,
    value: Tensor,
    kernel_size: Several,
    dilation: Several = 1,
    additional_values: Tensor | None = None,
    is_causal: Whether = False,
) -> Tensor:
    """`na1d_av` of (b, h, x, y, k·k + m) and (b, h, x, y, d)."""
    return _weighted("na2d_av", 2, attn, value, kernel_size, dilation, is_causal, additional_values)


def na3d_av(attn: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`na1d_av` of (b, h, x, y, z, k·k·k + m) and (b, h, x, y, z, d).

    Arguments are those of `na1d_av`, or of before 0.17: `kernel_size_d, kernel_size, dilation_d,
    dilation, additional_values`.
    """
    if "kernel_size_d" in kwargs or (len(args) > 2 and isinstance(args[2], int)):
        return _weighted_of_015(attn, value, *args, **kwargs)
    return _weighted_3d(attn, value, *args, **kwargs)


def natten1dqkrpb(
    query: Tensor, key: Tensor, rpb: Tensor | None, kernel_size: int, dilation: int
) -> Tensor:
    """`na1d_qk` with `rpb`."""
    return na1d_qk(query, key, kernel_size, dilation, rpb=rpb)


def natten2dqkrpb(
    query: Tensor, key: Tensor, rpb: Tensor | None, kernel_size: int, dilation: int
) -> Tensor:
    """`na2d_qk` with `rpb`."""
    return na2d_qk(query, key, kernel_size, dilation, rpb=rpb)


natten3dqkrpb = na3d_qk_with_bias
natten1dqk, natten2dqk, natten3dqk = na1d_qk, na2d_qk, na3d_qk
natten1dav, natten2dav, natten3dav = na1d_av, na2d_av, na3d_av


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    seqlens_Q: Tensor | None = None,
    seqlens_KV: Tensor | None = None,
    cumulative_seqlen_Q: Tensor | None = None,
    cumulative_seqlen_KV: Tensor | None = None,
    max_seqlen_Q: int | None = None,
    max_seqlen_KV: int | None = None,
    *args: Any,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    """Attention of each query to all keys.

    Args:
        query: (b, l, h, d), of a floating dtype.
        key: (b, m, g, d), g a divisor of h.
        value: (b, m, g, e).
        is_causal: whether query i sees keys up to i alone.
        scale: of the scores; None or 0 for 1/√d.
        seqlens_Q: packed sequences, which are refused, as are the next five where given.
        seqlens_KV: see there.
        cumulative_seqlen_Q: see there.
        cumulative_seqlen_KV: see there.
        max_seqlen_Q: see there.
        max_seqlen_KV: see there.
        args: of the kernels, without effect; so are `kwargs`.
        return_lse: whether the logarithm of each query's sum is returned, too.

    Returns:
        (b, l, h, e), in query's dtype; with `return_lse` after it (b, l, h), float32 or float64.

    Raises:
        NotImplementedError: sequences are packed.
        ValueError: shapes do not fit each other.
    """
    packed = (seqlens_Q, seqlens_KV, cumulative_seqlen_Q, cumulative_seqlen_KV)
    if any(given is not None for given in packed) or max_seqlen_Q or max_seqlen_KV:
        raise NotImplementedError(
            "natten.attention was called with packed sequences, which fuseport's stand-in for "
            "natten has not: call it for a batch"
        )
    _check_rank("attention", query, 4)
    _check_shapes(query, key, value, 0)
    scale = scale or query.shape[-1] ** -0.5
    out, sums = own.attend_all(query, key, value, is_causal, scale)
    out = _whole(out.to(query.dtype))
    return (out, _whole(sums)) if return_lse else out


def _attended(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Several,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    rank = query.dim() - 3
    _check_rank(name, query, 4, 5, 6)
    _check_shapes(query, key, value, rank)
    call = read_call(name, rank, kernel_size, args, kwargs)
    check_lengths(query.shape[1:-2], call.axes)
    if call.rpb is not None:
        _check_bias(call.rpb, query.shape[-2], call.axes)
    if call.added is not None:
        _check_added(key, value, call.added)
    scale = call.scale or query.shape[-1] ** -0.5
    out, sums = own.attend(query, key, value, call.axes, scale, call.rpb, call.added)
    out = _whole(out.to(query.dtype))
    return (out, _whole(sums)) if call.return_lse else out


def _scores(
    name: str,
    rank: int,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size: Several,
    dilation: Several,
    is_causal: Whether,
    added: Tensor | None,
) -> Tensor:
    _check_rank(name, query, rank + 3)
    if query.shape != key.shape:
        raise ValueError(
            f"natten's {name}: query is {tuple(query.shape)} and key {tuple(key.shape)}"
        )
    axes = axes_of(rank, kernel_size, 1, dilation, is_causal)
    check_odd(axes, name)
    check_lengths(query.shape[2:-1], axes)
    if bias is not None:
        _check_bias(bias, query.shape[1], axes)
    return _whole(own.scores_of(query, key, axes, bias, added))


def _scores_3d(
    query: Tensor,
    key: Tensor,
    kernel_size: Several,
    dilation: Several = 1,
    additional_keys: Tensor | None = None,
    is_causal: Whether = False,
    rpb: Tensor | None = None,
) -> Tensor:
    return _scores("na3d_qk", 3, query, key, rpb, kernel_size, dilation, is_causal, additional_keys)


def _weighted(
    name: str,
    rank: int,
    attn: Tensor,
    value: Tensor,
    kernel_size: Several,
    dilation: Several,
    is_causal: Whether,
    added: Tensor | None,
) -> Tensor:
    _check_rank(name, value, rank + 3)
    axes = axes_of(rank, kernel_size, 1, dilation, is_causal)
    check_odd(axes, name)
    check_lengths(value.shape[2:-1], axes)
    columns = prod(axis.kernel for axis in axes) + (0 if added is None else added.shape[2])
    if attn.shape != (*value.shape[:-1], columns):
        raise ValueError(
            f"natten's {name}: attn is {tuple(attn.shape)}, and value {tuple(value.shape)} has "
            f"{columns} weights at each place"
        )
    return _whole(own.weighted(attn, value, axes, added))


def _weighted_3d(
    attn: Tensor,
    value: Tensor,
    kernel_size: Several,
    dilation: Several = 1,
    additional_values: Tensor | None = None,
    is_causal: Whether = False,
) -> Tensor:
    return _weighted("na3d_av", 3, attn, value, kernel_size, dilation, is_causal, additional_values)


def _weighted_of_015(
    attn: Tensor,
    value: Tensor,
    kernel_size_d: int,
    kernel_size: int,
    dilation_d: int,
    dilation: int,
    additional_values: Tensor | None = None,
) -> Tensor:
    kernels = (kernel_size_d, kernel_size, kernel_size)
    dilations = (dilation_d, dilation, dilation)
    return _weighted_3d(attn, value, kernels, dilations, additional_values)


def _whole(x: Tensor) -> Tensor:
    """Contiguous, as natten's results are; copied always, since whether it was depends on sizes."""
    return x.clone(memory_format=torch.contiguous_format)


def _check_rank(name: str, x: Tensor, *ranks: int) -> None:
    if x.dim() not in ranks:
        raise ValueError(
            f"natten's {name} takes tensors of {' or '.join(map(str, ranks))} dimensions, and one "
            f"is {tuple(x.shape)}"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, rank: int) -> None:
    shapes = f"query is {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(f"natten: query, key and value have as many dimensions; {shapes}")
    places = query.shape[: 1 + rank]
    if key.shape[:-1] != value.shape[:-1] or key.shape[: 1 + rank] != places:
        raise ValueError(f"natten: batches, places or heads do not fit each other: {shapes}")
    if query.shape[-2] % key.shape[-2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"natten: heads or channels do not fit each other: {shapes}")


def _check_added(key: Tensor, value: Tensor, added: tuple[Tensor, Tensor]) -> None:
    for of, beside in zip((key, value), added, strict=True):
        if beside.dim() != 4 or beside.shape[2:] != of.shape[-2:] or len(beside) != len(of):
            raise ValueError(
                f"natten: an additional tensor is {tuple(beside.shape)}, not (batch, number, heads,"
                f" channels) as those of {tuple(of.shape)} are"
            )


def _check_bias(bias: Tensor, heads: Any, axes: Sequence[Axis]) -> None:
    if any(axis.causal for axis in axes):
        raise NotImplementedError("natten has no biases of relative places where it is causal")
    check_odd(axes, "biases of relative places")
    expected = (heads, *(2 * axis.kernel - 1 for axis in axes))
    if tuple(bias.shape) != expected:
        raise ValueError(f"natten: rpb is {tuple(bias.shape)}, not {expected}")
