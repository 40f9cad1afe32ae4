"""The functions of `causal_conv1d`, over the registered ops; see `fuseport.ops.causal_conv1d`."""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _conv
from fuseport.ops.causal_conv1d import causal_conv1d

__all__ = [
    "CausalConv1dFn",
    "causal_conv1d_fn",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
]

_ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op; with `return_final_states` the final states too, in `final_states_out` if given.

    Raises:
        NotImplementedError: the activation is none of None, silu, swish.
        ValueError: as the op; it takes seq_idx and initial_states not together.
    """
    _check(activation)
    out, states = causal_conv1d(x, weight, bias, seq_idx, initial_states, True, activation)
    if not return_final_states:
        return out
    return out, states if final_states_out is None else final_states_out.copy_(states)


class CausalConv1dFn:
    """What code takes that calls the autograd function by name: `CausalConv1dFn.apply(…)`."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Any:
        """`causal_conv1d_fn`; older versions have fewer arguments, and an activation last."""
        if rest and isinstance(rest[-1], str):
            rest = (*rest[:-1], *[None] * (5 - len(rest)), rest[-1])
        return causal_conv1d_fn(x, weight, bias, *rest)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The op `causal_conv1d_update`; `conv_state_indices`, (b,), chooses rows of conv_state.

    Raises:
        NotImplementedError: the activation is none of None, silu, swish.
    """
    _check(activation)
    silu = activation is not None
    return _conv.update(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices)


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `causal_conv1d_fn`: the package's own reference, which has another order of arguments."""
    return causal_conv1d_fn(
        x,
        weight,
        bias,
        seq_idx,
        initial_states,
        return_final_states,
        final_states_out,
        activation,
    )


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """As `causal_conv1d_update`."""
    return causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens)


def _check(activation: str | None) -> None:
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"activation is {activation!r}; it must be None, silu or swish")
