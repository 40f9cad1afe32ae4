"""What is done step after step: in a program one step of it, however many there are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._higher_order_ops.scan import scan

__all__ = ["stepwise"]

Step = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""(states, what a step is given) → (the states after it, what it makes)."""


def stepwise(
    one: Step, first: Sequence[Tensor], given: Sequence[Tensor], *, reverse: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The states after the last of all steps, and what all make, stacked in the first dimension.

    Args:
        one: a step.
        first: states before the first.
        given: what all steps are given, one along the first dimension of each.
        reverse: whether the last of these comes first.
    """
    if detect_fake_mode([*given]) is not None:
        states, made = scan(
            one, [*map(_whole, first)], [*map(_whole, given)], dim=0, reverse=reverse
        )
        return list(states), list(made)
    after, steps = list(first), []
    for t in reversed(range(len(given[0]))) if reverse else range(len(given[0])):
        after, made = one(after, [each[t] for each in given])
        steps.append(made)
    ordered = steps[::-1] if reverse else steps
    return after, [torch.stack(each) for each in zip(*ordered, strict=True)]


def _whole(t: Tensor) -> Tensor:
    """A copy, contiguous, as what a step leaves: what comes into one is nothing else's memory."""
    return t.clone(memory_format=torch.contiguous_format)
