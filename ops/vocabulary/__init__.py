"""The plain differentiable operators that fused ops are made of, as cases: data, written once.

`OPERATORS` and `CASES` are what `fuseport cases` runs through every runtime, forward and backward,
and dumps as files for engines that implement them by hand. One module is one family.
"""

from fuseport.ops.vocabulary import (
    activations,
    attention,
    elementwise,
    indexing,
    linear,
    losses,
    norms,
    pooling,
    recurrent,
    reductions,
    shapes,
)
from fuseport.ops.vocabulary.case import PlainCase, PlainOperator

__all__ = ["CASES", "FAMILIES", "OPERATORS"]

FAMILIES = {
    "elementwise": elementwise,
    "activations": activations,
    "linear": linear,
    "shapes": shapes,
    "indexing": indexing,
    "reductions": reductions,
    "recurrent": recurrent,
    "norms": norms,
    "pooling": pooling,
    "attention": attention,
    "losses": losses,
}
"""The modules, in the order in which their operators are listed."""

OPERATORS: dict[str, PlainOperator] = {
    operator.name: operator for family in FAMILIES.values() for operator in family.OPERATORS
}
"""Every operator, by name."""

CASES: tuple[PlainCase, ...] = tuple(case for family in FAMILIES.values() for case in family.CASES)
"""Every case; names are unique within an operator."""
