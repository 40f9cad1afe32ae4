"""Which kernels a layer has on a GPU: here they say only which layers may share places."""

from enum import Enum

__all__ = ["AlgoHint", "ConvAlgo"]


class ConvAlgo(Enum):
    """How a convolution goes about it."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    """What it is to be good at."""

    NoHint = 0b000
    Fowrard = 0b001  # as spconv spells it
    BackwardInput = 0b010
    BackwardWeight = 0b100
