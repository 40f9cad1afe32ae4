"""Initial values."""

import math

import torch
from torch import Tensor, nn

__all__ = ["kaiming_normal_"]


def kaiming_normal_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Normal, by how many values an output, or an input, is of.

    Those are counted as for a weight of torch's, whose first two dimensions are outputs and inputs,
    as MinkowskiEngine does, though a kernel's are not.

    Raises:
        ValueError: of another mode.
    """
    modes = ("fan_in", "fan_out")
    if mode.lower() not in modes:
        raise ValueError(f"Mode {mode} not supported, please use one of {modes}")
    fans = nn.init._calculate_fan_in_and_fan_out(tensor)
    gain = nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    with torch.no_grad():
        return tensor.normal_(0, gain / math.sqrt(fans[modes.index(mode.lower())]))
