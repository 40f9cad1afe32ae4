"""The attention as a function."""

from torch import Tensor

from ..ext import flash_deform_attn_forward

__all__ = ["FlashDeformAttnFunction"]


class FlashDeformAttnFunction:
    """Called by `apply`, as the autograd function of that name is; its gradient is torch's."""

    @staticmethod
    def apply(
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_level_start_index: Tensor,
        sampling_loc_attn: Tensor,
        im2col_step: int,
        K: int = 8,  # the package's name
    ) -> Tensor:
        """Arguments are those of `ext.flash_deform_attn_forward`."""
        levels = (value_spatial_shapes, value_level_start_index)
        return flash_deform_attn_forward(value, *levels, sampling_loc_attn, im2col_step, K, 8, 0)
