"""The correlations as modules."""

from torch import Tensor, nn

from ..functions.corr import correlation, correlation1d

__all__ = ["Correlation", "Correlation1d"]


class Correlation(nn.Module):
    """`functions.corr.correlation` with these sizes."""

    _function = correlation

    def __init__(
        self,
        pad_size: int = 0,
        kernel_size: int = 0,
        max_displacement: int = 0,
        stride1: int = 1,
        stride2: int = 2,
        corr_multiply: int = 1,
    ) -> None:
        super().__init__()
        self.pad_size = pad_size
        self.kernel_size = kernel_size
        self.max_displacement = max_displacement
        self.stride1 = stride1
        self.stride2 = stride2
        self.corr_multiply = corr_multiply

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """(b, c, h, w) twice to (b, displacements, h', w')."""
        return self._function(
            self.pad_size,
            self.kernel_size,
            self.max_displacement,
            self.stride1,
            self.stride2,
            self.corr_multiply,
        )(input1, input2)


class Correlation1d(Correlation):
    """`functions.corr.correlation1d` with these sizes."""

    _function = correlation1d
