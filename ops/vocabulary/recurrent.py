"""Recurrent networks, their weights as inputs, under the names that torch.nn gives them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, normal, row

__all__ = ["CASES", "OPERATORS"]

_ABOUT = "torch.nn's formulas, order of gates and names of weights; in evaluation, no dropout"


def _shape(weights: dict[str, Tensor]) -> tuple[bool, int, bool]:
    """Whether there are biases, how many layers, and whether both directions."""
    biased = any(name.startswith("bias") for name in weights)
    both = any(name.endswith("_reverse") for name in weights)
    layers = sum(n.startswith("weight_ih") and not n.endswith("_reverse") for n in weights)
    return biased, layers, both


def _lstm(
    input: Tensor, h0: Tensor, c0: Tensor, batch_first: bool = False, **weights: Tensor
) -> dict[str, Tensor]:
    biased, layers, both = _shape(weights)
    flat = list(weights.values())
    given = (input, (h0, c0), flat, biased, layers, 0.0, False, both, batch_first)
    output, h, c = torch.lstm(*given)
    return {"output": output, "h": h, "c": c}


def _gru(input: Tensor, h0: Tensor, batch_first: bool = False, **weights: Tensor) -> Any:
    biased, layers, both = _shape(weights)
    flat = list(weights.values())
    output, h = torch.gru(input, h0, flat, biased, layers, 0.0, False, both, batch_first)
    return {"output": output, "h": h}


def _rnn(
    input: Tensor,
    h0: Tensor,
    nonlinearity: str = "tanh",
    batch_first: bool = False,
    **weights: Tensor,
) -> Any:
    biased, layers, both = _shape(weights)
    run = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    flat = list(weights.values())
    output, h = run(input, h0, flat, biased, layers, 0.0, False, both, batch_first)
    return {"output": output, "h": h}


OPERATORS = (
    PlainOperator("rnn", _rnn, ("output", "h"), _ABOUT),
    PlainOperator("lstm", _lstm, ("output", "h", "c"), _ABOUT),
    PlainOperator("gru", _gru, ("output", "h"), _ABOUT),
)

_GATES = {"rnn": 1, "lstm": 4, "gru": 3}
_STATES = {"rnn": ("h0",), "lstm": ("h0", "c0"), "gru": ("h0",)}


def _case(
    operator: str,
    name: str,
    *,
    time: int = 4,
    batch: int = 2,
    inputs: int = 3,
    hidden: int = 5,
    layers: int = 1,
    both: bool = False,
    biased: bool = True,
    first: bool = False,
    layout: Any = "contiguous",
    **attributes: Any,
) -> PlainCase:
    directions = 2 if both else 1
    shape = (batch, time, inputs) if first else (time, batch, inputs)
    tensors: dict[str, Draw] = {"input": row(*shape) if layout == "expanded" else normal(*shape)}
    tensors |= {s: normal(layers * directions, batch, hidden) for s in _STATES[operator]}
    rows = _GATES[operator] * hidden
    for layer in range(layers):
        for end in ("", "_reverse")[:directions]:
            width = inputs if layer == 0 else directions * hidden
            tensors[f"weight_ih_l{layer}{end}"] = normal(rows, width, scale=0.5)
            tensors[f"weight_hh_l{layer}{end}"] = normal(rows, hidden, scale=0.5)
            if biased:
                tensors[f"bias_ih_l{layer}{end}"] = normal(rows, scale=0.5)
                tensors[f"bias_hh_l{layer}{end}"] = normal(rows, scale=0.5)
    if first:
        attributes["batch_first"] = True
    return PlainCase(name, operator, tensors, attributes, layout=layout)


def _cases(operator: str) -> Iterator[PlainCase]:
    yield _case(operator, "plain")
    yield _case(operator, "one step, one sequence", time=1, batch=1)
    yield _case(operator, "size 1", inputs=1, hidden=1)
    yield _case(operator, "two layers", layers=2)
    yield _case(operator, "both directions", both=True)
    yield _case(operator, "two layers, both directions", layers=2, both=True)
    yield _case(operator, "no bias", biased=False)
    yield _case(operator, "batch first", first=True)
    yield _case(operator, "transposed", layout="transposed")
    yield _case(operator, "strides of 0", layout="expanded")


CASES = (
    *_cases("rnn"),
    _case("rnn", "relu", nonlinearity="relu"),
    _case("rnn", "relu, both directions", nonlinearity="relu", both=True),
    *_cases("lstm"),
    *_cases("gru"),
)
