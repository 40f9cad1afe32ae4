"""Recurrent layers over a dynamic length, as `scan`: torch has them as one step after another."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

__all__ = ["LAYERS", "at_most", "is_layer", "lengthened", "not_above", "over_steps"]

_Size = Any  # int | SymInt; what takes one takes the other, but for torch's stubs

_BOUNDS: WeakKeyDictionary[Any, dict[Any, _Size]] = WeakKeyDictionary()
"""By torch's environment of sizes, what sizes are not above."""

# One step of a layer: (what inputs add to the gates, states, weights of the states, their bias, and
# those of an LSTM's projection) → states; the first of them is the output. Formulas and order of
# gates: torch.nn.LSTM, GRU and RNN.
_Step = Callable[..., tuple[Tensor, ...]]


def _lstm(
    given: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    projection: Tensor | None = None,
) -> tuple[Tensor, ...]:
    h, c = states
    i, f, g, o = (given + (h @ weight + bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if projection is None else h @ projection), c


def _gru(
    given: Tensor, states: Sequence[Tensor], weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    (h,) = states
    r, z, n = given.chunk(3, -1)
    of_r, of_z, of_n = (h @ weight + bias).chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + of_r) * of_n)
    return ((h - n) * torch.sigmoid(z + of_z) + n,)


def _tanh(
    given: Tensor, states: Sequence[Tensor], weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    return (torch.tanh(given + (states[0] @ weight + bias)),)


def _relu(
    given: Tensor, states: Sequence[Tensor], weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    return (torch.relu(given + (states[0] @ weight + bias)),)


_STEPS: dict[Any, _Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
}


def is_layer(func: Any) -> bool:
    """Whether a function of torch's is that of a recurrent layer."""
    return func in _STEPS


def _recurrent(func: Any, *args: Any, **kwargs: Any) -> Any:
    # Not where the length is a number, nor with dropout, nor of what is packed.
    if len(args) != 9 or kwargs:
        return NotImplemented
    x, first, weights, biased, layers, dropout, training, both, batch_first = args
    if training and dropout:
        return NotImplemented
    if batch_first:
        x = x.transpose(0, 1)
    if not isinstance(x.shape[0], torch.SymInt):
        return NotImplemented
    steps: _Size = x.shape[0]
    mask = None
    if (most := at_most(steps)) is not None:
        mask = torch.arange(most, device=x.device).reshape(-1, *[1] * (x.dim() - 1)) < steps
        # Of what is lengthened torch does not know that size in the example, but of the mask.
        longer = lengthened(x, most)
        x = torch.where(mask, longer, torch.zeros_like(longer))
    y, *last = over_steps(func, x, first, weights, biased, layers, both, mask)
    y = y if mask is None else y[:steps]
    return (y.transpose(0, 1) if batch_first else y, *last)


LAYERS = {func: functools.partial(_recurrent, func) for func in _STEPS}
"""What computes the same as `torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu`, of any length."""


def not_above(size: _Size, most: _Size) -> None:
    """Note of a size that hangs on values what it is not above."""
    torch._check(size <= most)
    if isinstance(size, SymInt):
        known = at_most(most)
        most = most if known is None else known
        _BOUNDS.setdefault(size.node.shape_env, {})[size.node.expr] = most


def at_most(size: _Size) -> _Size | None:
    """What is noted of a size so, if it hangs on values.

    `scan` asks whether there are steps, which nothing says of the former.
    """
    return _BOUNDS.get(size.node.shape_env, {}).get(size.node.expr) if _is_any(size) else None


def _is_any(size: _Size) -> bool:
    return isinstance(size, SymInt) and bool(free_unbacked_symbols(size))


def lengthened(x: Tensor, steps: _Size) -> Tensor:
    """With more steps, of zeros: (steps, *)."""
    more = x.new_zeros((steps - x.shape[0], *x.shape[1:]))
    return torch.cat([x, more])


def over_steps(
    func: Any,
    x: Tensor,
    first: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    both: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The outputs and the last states of the layers of `func`.

    Args:
        func: one for which `is_layer`.
        x: (length, batch, features).
        first: states, (layers * directions, batch, …).
        weights: of all layers and directions, as torch has them in a list.
        biased: whether they have biases.
        layers: how many.
        both: whether each goes in both directions.
        mask: (length, batch, 1); where it is False a sequence has ended, and its states stay what
            they are. Of the outputs, those mean nothing.
    """
    step = _STEPS[func]
    if mask is not None:
        mask = mask.clone()  # torch's guards fail where one loop's is a view and another's is none
    directions = 2 if both else 1
    of_layer = len(weights) // (layers * directions)
    states_first = first if isinstance(first, list | tuple) else [first]
    last: list[list[Tensor]] = [[] for _ in states_first]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            output, states = _layer(
                step,
                x,
                [state[at] for state in states_first],
                weights[at * of_layer : (at + 1) * of_layer],
                biased,
                backwards=direction == 1,
                mask=mask,
            )
            outputs.append(output)
            for of_kind, state in zip(last, states, strict=True):
                of_kind.append(state)
        x = torch.cat(outputs, -1) if both else outputs[0]
    return (x, *(torch.stack(states) for states in last))


def _layer(
    step: _Step,
    x: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    backwards: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    given, weight = x @ weights[0].mT, weights[1].mT.contiguous()
    bias = weights[3] if biased else torch.zeros_like(weight[0])
    if biased:
        given = given + weights[2]
    projection = [w.mT.contiguous() for w in weights[4 if biased else 2 :]]

    def one(states: list[Tensor], at: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        after = step(at[0], states, weight, bias, *projection)
        for kept in at[1:]:
            after = tuple(
                torch.where(kept, new, old) for new, old in zip(after, states, strict=True)
            )
        # A state and an output must not be one tensor, nor a state what comes in.
        return list(after), after[0].clone()

    # Those given may be one tensor, as the zeros of nn.LSTM are, or expanded.
    over = (given,) if mask is None else (given, mask)
    states, output = scan(one, [s.clone() for s in first], over, dim=0, reverse=backwards)
    return output, states
