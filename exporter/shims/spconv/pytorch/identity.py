"""What leaves its input as it is."""

from typing import Any

from torch import nn

__all__ = ["Identity"]


class Identity(nn.Module):
    """Of any input."""

    def forward(self, input: Any) -> Any:
        """`input`."""
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        """The size that makes `out_size`."""
        return out_size
