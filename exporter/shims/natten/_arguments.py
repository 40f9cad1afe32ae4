"""What the functions and layers of natten are asked for, in the order of each version's arguments.

Versions before 0.20 have no stride, and their arguments are in other places: `na2d(q, k, v, 7, 2)`
has a dilation of 2 there, and a stride of 2 since. A call is read as every version would; where two
could be meant, and differ, it is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeVar

from torch import Tensor

from ._tiles import Axis

__all__ = [
    "Call",
    "Layer",
    "axes_of",
    "check_all_args",
    "check_lengths",
    "check_odd",
    "read_call",
    "read_layer",
]

_Read = TypeVar("_Read")
Several = int | Sequence[int] | None
Whether = bool | Sequence[bool] | None


class _OfOthers(Exception):
    """Arguments are not those of a version."""


@dataclass(frozen=True)
class Call:
    """What `na1d`, `na2d` or `na3d` is asked for.

    Attributes:
        axes: of each dimension.
        rpb: biases of relative places, (h, (2k - 1)…), or None.
        scale: of the scores; None or 0 for 1/√d.
        added: keys and values that all queries see, or None.
        return_lse: whether the logarithm of each query's sum is returned, too.
    """

    axes: tuple[Axis, ...]
    rpb: Tensor | None
    scale: float | None
    added: tuple[Tensor, Tensor] | None
    return_lse: bool


@dataclass(frozen=True)
class Layer:
    """What a `NeighborhoodAttention…` is asked for.

    Attributes:
        dim: channels.
        num_heads: heads.
        axes: of each dimension.
        has_bias: whether there are biases of relative places; None where versions differ.
        qkv_bias: whether the first linear layer has a bias.
        qk_scale: of the scores; None or 0 for 1/√(dim / num_heads).
        attn_drop: dropout of weights.
        proj_drop: dropout of what is returned.
        pads: whether inputs smaller than the windows are padded; None where versions differ.
    """

    dim: int
    num_heads: int
    axes: tuple[Axis, ...]
    has_bias: bool | None
    qkv_bias: bool
    qk_scale: float | None
    attn_drop: float
    proj_drop: float
    pads: bool | None


def read_call(name: str, rank: int, kernel: Any, args: Any, kwargs: Any) -> Call:
    """What follows a call's tensors and kernel size.

    Raises:
        TypeError: no version has such arguments, or two do and mean different things by them.
        ValueError: a size is none of natten's.
    """

    versions: Sequence[Callable[..., Call]] = (_call_of_017, _call_of_020)
    first, *others = _read(name, versions, (rank, kernel, *args), kwargs)
    if any(_meant(other) != _meant(first) for other in others):
        raise _two_meanings(name, "dilation= or stride=")
    return first


def read_layer(name: str, rank: int, args: Any, kwargs: Any) -> Layer:
    """A layer's arguments.

    Raises:
        TypeError: no version has such arguments, or two do and mean different things by them.
        ValueError: a size is none of natten's, or heads do not divide channels.
    """

    oldest = _layer_of_015_3d if rank == 3 else _layer_of_015
    versions: Sequence[Callable[..., Layer]] = (oldest, _layer_of_017, _layer_of_020)
    first, *others = _read(name, versions, (rank, *args), kwargs)
    if any(_undecided(other) != _undecided(first) for other in others):
        raise _two_meanings(name, "dilation=, stride=, is_causal= or bias=")
    if first.dim % first.num_heads:
        raise ValueError(
            f"natten: {first.num_heads} heads do not divide {first.dim} channels evenly"
        )
    differing = len({layer.has_bias for layer in (first, *others)}) > 1
    return first if not differing else _undecided(first)


def check_all_args(na_dim: int, kernel_size: Any, *others: Any) -> tuple[tuple[Any, ...], ...]:
    """Sizes as tuples: of kernel size, dilation and causality, or with a stride after the first.

    Raises:
        ValueError: one is none of natten's.
    """
    *steps, is_causal = others
    kernel = _sizes("kernel_size", na_dim, kernel_size, 2)
    names = ("stride", "dilation")[-len(steps) :]
    found = [_sizes(name, na_dim, step, 1) for name, step in zip(names, steps, strict=True)]
    return kernel, *found, _truths(na_dim, is_causal)


def axes_of(rank: int, kernel: Any, stride: Any, dilation: Any, causal: Any) -> tuple[Axis, ...]:
    """How windows lie along each dimension.

    Raises:
        ValueError: a size is none of natten's.
    """
    for given in (stride, dilation):
        if isinstance(given, bool):
            raise _OfOthers
    if isinstance(causal, int) and not isinstance(causal, bool):
        raise _OfOthers
    kernels, strides, dilations, causals = check_all_args(rank, kernel, stride, dilation, causal)
    for size, step in zip(kernels, strides, strict=True):
        if step > size:
            raise ValueError(f"natten: a stride of {step} is larger than the kernel's {size}")
    return tuple(map(Axis, kernels, strides, dilations, causals))


def check_lengths(lengths: Sequence[Any], axes: Sequence[Axis]) -> None:
    """Raises ValueError where windows do not fit into (L…)."""
    for length, axis in zip(lengths, axes, strict=True):
        if length < axis.kernel * axis.dilation:
            raise ValueError(
                f"natten: a kernel of {axis.kernel} with a dilation of {axis.dilation} does not fit"
                f" into an input of {tuple(lengths)}"
            )


def check_odd(axes: Sequence[Axis], what: str) -> None:
    """Raises ValueError for kernels without a middle."""
    if any(axis.kernel % 2 == 0 for axis in axes):
        kernels = tuple(axis.kernel for axis in axes)
        raise ValueError(f"natten has {what} of odd kernels alone, and they are {kernels}")


def _call_of_017(
    rank: int,
    kernel: Any,
    /,
    dilation: Several = 1,
    is_causal: Whether = False,
    rpb: Tensor | None = None,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    xformers_kwargs: Any = None,
) -> Call:
    axes = axes_of(rank, kernel, 1, dilation, is_causal)
    return Call(axes, rpb, scale, _both(additional_keys, additional_values), False)


def _call_of_020(
    rank: int,
    kernel: Any,
    /,
    stride: Several = 1,
    dilation: Several = 1,
    is_causal: Whether = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: Any = None,
    backend: Any = None,
    q_tile_shape: Any = None,
    kv_tile_shape: Any = None,
    backward_q_tile_shape: Any = None,
    backward_kv_tile_shape: Any = None,
    backward_kv_splits: Any = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Call:
    axes = axes_of(rank, kernel, stride, dilation, is_causal)
    return Call(axes, None, scale, _both(additional_keys, additional_values), return_lse)


def _layer_of_015(
    rank: int,
    /,
    dim: int,
    num_heads: int,
    kernel_size: int,
    dilation: int | None = 1,
    bias: bool = True,
    qkv_bias: bool = True,
    qk_scale: float | None = None,
    attn_drop: float = 0.0,
    proj_drop: float = 0.0,
) -> Layer:
    axes = axes_of(rank, _odd(kernel_size), 1, _one(dilation or 1), False)
    return Layer(
        dim, num_heads, axes, _flag(bias), _flag(qkv_bias), qk_scale, attn_drop, proj_drop, True
    )


def _layer_of_015_3d(
    rank: int,
    /,
    dim: int,
    num_heads: int,
    kernel_size: int,
    kernel_size_d: int | None = None,
    dilation: int | None = 1,
    dilation_d: int | None = None,
    bias: bool = True,
    qkv_bias: bool = True,
    qk_scale: float | None = None,
    attn_drop: float = 0.0,
    proj_drop: float = 0.0,
) -> Layer:
    kernel, apart = _odd(kernel_size), _one(dilation or 1)
    kernels = (_odd(kernel_size_d or kernel), kernel, kernel)
    axes = axes_of(rank, kernels, 1, (_one(dilation_d or apart), apart, apart), False)
    return Layer(
        dim, num_heads, axes, _flag(bias), _flag(qkv_bias), qk_scale, attn_drop, proj_drop, True
    )


def _layer_of_017(
    rank: int,
    /,
    dim: int,
    num_heads: int,
    kernel_size: Several,
    dilation: Several = 1,
    is_causal: Whether = False,
    rel_pos_bias: bool = False,
    qkv_bias: bool = True,
    qk_scale: float | None = None,
    attn_drop: float = 0.0,
    proj_drop: float = 0.0,
    use_experimental_ops: bool = False,
) -> Layer:
    axes = axes_of(rank, kernel_size, 1, dilation, is_causal)
    has_bias, qkv_bias = _flag(rel_pos_bias), _flag(qkv_bias)
    return Layer(dim, num_heads, axes, has_bias, qkv_bias, qk_scale, attn_drop, proj_drop, False)


def _layer_of_020(
    rank: int,
    /,
    embed_dim: int,
    num_heads: int,
    kernel_size: Several,
    stride: Several = 1,
    dilation: Several = 1,
    is_causal: Whether = False,
    qkv_bias: bool = True,
    qk_scale: float | None = None,
    proj_drop: float = 0.0,
) -> Layer:
    axes = axes_of(rank, kernel_size, stride, dilation, is_causal)
    qkv_bias = _flag(qkv_bias)
    return Layer(embed_dim, num_heads, axes, False, qkv_bias, qk_scale, 0.0, proj_drop, False)


def _read(
    name: str, versions: Sequence[Callable[..., _Read]], args: Any, kwargs: Any
) -> list[_Read]:
    """What the arguments are in each version that has such."""
    found: list[_Read] = []
    refused: Exception | None = None
    for version in versions:
        try:
            bound = signature(version).bind(*args, **kwargs)
        except TypeError as error:
            refused = refused or TypeError(f"natten's {name}: {error}")
            continue
        try:
            found.append(version(*bound.args, **bound.kwargs))
        except _OfOthers:
            continue
        except ValueError as error:
            refused = error
    if not found:
        raise refused or TypeError(f"natten's {name}: no version has arguments of these types")
    return found


def _two_meanings(name: str, names: str) -> TypeError:
    return TypeError(
        f"natten's {name} was called with sizes by their place, which differs from version to "
        f"version, so that they mean two things: call it with {names}"
    )


def _meant(call: Call) -> tuple[Any, ...]:
    """What is the same of two calls that are: tensors are compared as objects."""
    tensors = (call.rpb, *(call.added or ()))
    return call.axes, call.scale, call.return_lse, *map(id, tensors)


def _undecided(layer: Layer) -> Layer:
    return replace(layer, has_bias=None, pads=None)


def _both(keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise ValueError("natten: additional_keys and additional_values come together")
    return keys, values


def _one(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise _OfOthers
    return given


def _odd(given: Any) -> int:
    kernel = _one(given)
    if kernel % 2 == 0:
        raise _OfOthers
    return kernel


def _flag(given: Any) -> bool:
    if not isinstance(given, bool):
        raise _OfOthers
    return given


def _sizes(name: str, rank: int, given: Any, least: int) -> tuple[int, ...]:
    if given is None and name != "kernel_size":
        given = 1
    sizes = (given,) * rank if isinstance(given, int) else tuple(given or ())
    if len(sizes) != rank or not all(_is_size(size, least) for size in sizes):
        raise ValueError(f"natten: {name} is {given}, not {rank} integers from {least} on, or one")
    return sizes


def _is_size(given: Any, least: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def _truths(rank: int, given: Any) -> tuple[bool, ...]:
    given = False if given is None else given
    truths = (given,) * rank if isinstance(given, bool) else tuple(given)
    if len(truths) != rank or not all(isinstance(truth, bool) for truth in truths):
        raise ValueError(f"natten: is_causal is {given}, not {rank} booleans, or one")
    return truths
