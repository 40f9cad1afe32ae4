"""Which nodes of a graph draw at random, and which do more than to compute what they return."""

import torch
from torch import fx
from torch._ops import OpOverload

__all__ = ["acts", "draws"]

_SHARES = ("dropout_p", "dropout", "p")  # of what is dropped


def draws(node: fx.Node) -> bool:
    """Whether it draws: torch says so of operators that may, as attention and recurrent layers,
    which do with dropout alone."""
    if not _may_draw(node):
        return False
    assert isinstance(node.target, OpOverload)
    known = node.target._schema.arguments
    given = dict(zip((argument.name for argument in known), node.args, strict=False))
    given = {argument.name: argument.default_value for argument in known} | given | node.kwargs
    trained, share = given.get("train", True), next(filter(given.__contains__, _SHARES), None)
    return trained is not False and not (share is not None and given[share] in (0, None))


def acts(node: fx.Node) -> bool:
    """Whether it draws, asserts or writes."""
    return draws(node) if _may_draw(node) else node.is_impure()


def _may_draw(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
