"""The attention as a layer."""

import math

import torch
from torch import Tensor, nn

from ..functions import FlashDeformAttnFunction

__all__ = ["FlashDeformAttn"]


class FlashDeformAttn(nn.Module):
    """Deformable attention over several levels, with the parameters of Deformable DETR's.

    Places are rounded to float16, as the package does.

    Args:
        d_model: channels, a multiple of `n_heads`.
        n_levels, n_heads, n_points: of maps, of heads, and of places in a map for a head.
    """

    def __init__(
        self, d_model: int = 256, n_levels: int = 4, n_heads: int = 8, n_points: int = 4
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(
                f"d_model must be divisible by n_heads, but got {d_model} and {n_heads}"
            )
        self.im2col_step = 64
        self.d_model, self.n_levels, self.n_heads, self.n_points = (
            d_model,
            n_levels,
            n_heads,
            n_points,
        )
        count = n_heads * n_levels * n_points
        self.sampling_offsets = nn.Linear(d_model, count * 2)
        self.attention_weights = nn.Linear(d_model, count)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Each head looks along a direction of its own, each point one step further."""
        angles = torch.arange(self.n_heads) * (2 * math.pi / self.n_heads)
        directions = torch.stack([angles.cos(), angles.sin()], -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.n_points + 1)[:, None]
        places = (directions[:, None, None] * steps).repeat(1, self.n_levels, 1, 1)
        nn.init.zeros_(self.sampling_offsets.weight)
        self.sampling_offsets.bias = nn.Parameter(places.flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for layer in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor,
        input_level_start_index: Tensor,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the pixels around reference points.

        Args:
            query: (b, q, channels).
            reference_points: (b, q, levels, 2), x and y from 0 to 1; or 4, with a width and height.
            input_flatten: (b, pixels of all levels, channels).
            input_spatial_shapes: (levels, 2), height and width.
            input_level_start_index: (levels,).
            input_padding_mask: (b, pixels), true where there is nothing.

        Returns:
            (b, q, channels).

        Raises:
            ValueError: reference points have another number of values.
        """
        batch, queries, _ = query.shape
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0.0)
        value = value.view(batch, -1, self.n_heads, self.d_model // self.n_heads)
        heads = (batch, queries, self.n_heads)
        moves = self.sampling_offsets(query).view(*heads, self.n_levels, self.n_points, 2)
        logits = self.attention_weights(query).view(*heads, self.n_levels * self.n_points)
        at = reference_points[:, :, None, :, None]
        if reference_points.shape[-1] == 2:
            places = at + moves / input_spatial_shapes.flip(-1)[:, None]
        elif reference_points.shape[-1] == 4:
            places = at[..., :2] + moves / self.n_points * at[..., 2:] * 0.5
        else:
            raise ValueError(
                "Last dim of reference_points must be 2 or 4, but get "
                f"{reference_points.shape[-1]} instead."
            )
        out = FlashDeformAttnFunction.apply(
            value,
            input_spatial_shapes,
            input_level_start_index,
            torch.cat([places.flatten(-3).half(), logits], -1),
            self.im2col_step,
            self.n_points,
        )
        result: Tensor = self.output_proj(out)
        return result
