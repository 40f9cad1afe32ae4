"""Mistakes that several ops can make, as runs of a `PlantedBug`; each op's own are in its cases."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.spec import Inputs, Outputs, Run

__all__ = [
    "SOFTPLUS_THRESHOLD",
    "groups_in_turn",
    "reads",
    "returns",
    "silu_underived",
    "softplus_underived",
]

SOFTPLUS_THRESHOLD = {
    "body: wrong constant: *: Constant to threshold_float*": "softplus is the identity above 20: "
    "from 20 to 20.2 the two differ by 2e-9 at most, which is nothing in float32"
}
"""Of `OpSpec.no_bugs`, for ops with a softplus whose body has that constant."""

BugRun = Callable[[Run, Inputs], Outputs]


def reads(edits: Mapping[str, Callable[[Inputs], Any]]) -> BugRun:
    """Some inputs are read as what these make of all of them."""

    def run(right: Run, given: Inputs) -> Outputs:
        return right({**given, **{name: edit(given) for name, edit in edits.items()}})

    return run


def returns(edits: Mapping[str, Callable[[Inputs, Outputs], Tensor]]) -> BugRun:
    """Some outputs are what these make of inputs and right outputs, in the right one's memory."""

    def run(right: Run, given: Inputs) -> Outputs:
        found = right(given)
        wrong = {name: edit(given, found) for name, edit in edits.items()}
        return {**found, **{n: found[n].clone().copy_(t) for n, t in wrong.items()}}

    return run


def softplus_underived(step: str, bias: str, channels: int, flag: str) -> BugRun:
    """A backward without the derivative of softplus, σ(step + bias).

    Args:
        step: the input that passes through softplus.
        bias: (channels,), added to it before.
        channels: the dimension of `step` that they are.
        flag: the input that says whether there is a softplus.
    """

    def run(right: Run, given: Inputs) -> Outputs:
        found = right(given)
        if not given[flag]:
            return found
        shape = [1] * given[step].dim()
        shape[channels] = -1
        raw = given[step].to(given[bias].dtype) + given[bias].reshape(shape)
        wrong = found[f"d{step}"].to(raw.dtype) / raw.sigmoid().where(raw <= 20, 1.0)
        others = [i for i in range(raw.dim()) if i != channels]
        return {
            **found,
            f"d{step}": found[f"d{step}"].clone().copy_(wrong),
            f"d{bias}": found[f"d{bias}"].clone().copy_(wrong.sum(others)),
        }

    return run


def silu_underived(gate: str) -> BugRun:
    """A backward that takes σ for the derivative of SiLU, σ(gate)·(1 + gate·(1 - σ(gate)))."""

    def run(right: Run, given: Inputs) -> Outputs:
        found = right(given)
        g = given[gate].double()
        factor = 1 + g * (1 - g.sigmoid())
        # Where the derivative is near zero, so is the gradient: it stays.
        wrong = found[f"d{gate}"] / factor.where(factor.abs() > 1e-3, 1.0)
        return {**found, f"d{gate}": found[f"d{gate}"].clone().copy_(wrong)}

    return run


def groups_in_turn(names: tuple[str, ...], rank: int, dim: int, like: str, channels: int) -> BugRun:
    """Channel i takes group i % G, not i // (channels / G).

    Args:
        names: of the inputs that have groups.
        rank: of those; others have none.
        dim: of the groups.
        like: the input whose channels they are.
        channels: the dimension of `like`.
    """

    def run(right: Run, given: Inputs) -> Outputs:
        count = given[like].shape[channels]
        wrong = {}
        for name in names:
            t = given[name]
            if t.dim() == rank and 1 < t.shape[dim] < count:
                index = torch.arange(count) % t.shape[dim]
                wrong[name] = t.index_select(dim, index)
        return right({**given, **wrong})

    return run
