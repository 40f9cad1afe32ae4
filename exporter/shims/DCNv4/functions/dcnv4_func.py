"""The convolution as a function."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ext import dcnv4_forward

__all__ = ["DCNv4Function"]


class DCNv4Function:
    """Called by `apply`, as the autograd function of that name is; its gradient is torch's."""

    @staticmethod
    def apply(*arguments: Any) -> Tensor:
        """Those of `ext.dcnv4_forward`, up to `remove_center`."""
        convolved: Callable[..., Tensor] = dcnv4_forward
        return convolved(*arguments, d_stride=8, block_thread=0, softmax=False)
