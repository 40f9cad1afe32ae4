"""Functions that are made of sizes and called with tensors, as autograd functions once were."""

from torch import Tensor

from fuseport.exporter.shims._correlation import mean_windows

__all__ = ["correlation", "correlation1d"]


class correlation:  # noqa: N801  # the package's name
    """FlowNet's correlation: (b, c, h, w) twice to (b, displacements, h', w').

    Raises:
        NotImplementedError: at the call, the kernel is of an even size and reaches over the
            frame, where the package reads what is beside it in memory.
    """

    def __init__(
        self,
        pad_size: int = 3,
        kernel_size: int = 3,
        max_displacement: int = 20,
        stride1: int = 1,
        stride2: int = 1,
        corr_multiply: int = 1,
    ) -> None:
        self.pad_size = pad_size
        self.kernel_size = kernel_size
        self.max_displacement = max_displacement
        self.stride1 = stride1
        self.stride2 = stride2
        self.corr_multiply = corr_multiply

    def __call__(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Products at displacements in both directions, rows first, averaged."""
        return self._windows(input1, input2, self.pad_size, self.max_displacement)

    def _windows(self, input1: Tensor, input2: Tensor, pad: int, reach: int) -> Tensor:
        """`pad` and `reach` are of height; those of width are always there."""
        if self.kernel_size % 2 == 0:
            raise NotImplementedError(
                f"kernel_size {self.kernel_size}: correlation_package reads outside of its padded "
                "inputs where that is even"
            )
        # Windows begin at `max_displacement`: there they have their upper left corner.
        return mean_windows(
            input1,
            input2,
            (pad, self.pad_size),
            (reach, self.max_displacement),
            self.kernel_size,
            (reach, self.max_displacement),
            self.stride1,
            self.stride2,
        )


class correlation1d(correlation):  # noqa: N801
    """The same along rows only, for disparities."""

    def __call__(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Products at displacements to the left and right, averaged."""
        return self._windows(input1, input2, 0, 0)
