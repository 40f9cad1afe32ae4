"""Multi-scale deformable attention in plain torch: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Levels
are told apart by indices alone, so that their number and sizes are data. Sums are of float32 at
least. Backward is stated explicitly, because autograd cannot be called inside a registered
operator. With a the attention weight of a point, w_k the shares of the pixels v_k around it in its
sample (`bilinear.corners`), and g the cotangent of a query and head:

    da = Σ_k w_k (g·v_k)        dv_k = Σ a w_k g over all points that see the pixel
    dx = W a Σ_k ∂w_k/∂x (g·v_k)        dy = H a Σ_k ∂w_k/∂y (g·v_k)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fuseport.ops.ms_deform_attn.bilinear import Corner, corners
from fuseport.ops.ms_deform_attn.shapes import check, check_cotangent, check_levels, wide

__all__ = ["ms_deform_attn", "ms_deform_attn_backward"]


def ms_deform_attn(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """out, (b, q, h·c), contiguous."""
    op = "ms_deform_attn"
    levels = (value_spatial_shapes, value_level_start_index)
    check(op, value, *levels, sampling_locations, attention_weights)
    check_levels(op, value, *levels)
    b, _, h, c = value.shape
    q = sampling_locations.shape[1]
    weights = attention_weights.to(wide(value.dtype))
    table = _table(value)
    out = weights.new_zeros((b, q, h, 1, c))
    for corner, rows in _corners(value, *levels, sampling_locations):
        share = (weights * corner.weight).flatten(3).unsqueeze(3)
        out = out + share @ table[rows].flatten(3, 4)
    return out.to(value.dtype).reshape(b, q, h * c)


def ms_deform_attn_backward(
    dout: Tensor,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dvalue, dsampling_locations, dattention_weights), each in its input's shape and dtype."""
    op = "ms_deform_attn_backward"
    levels = (value_spatial_shapes, value_level_start_index)
    check(op, value, *levels, sampling_locations, attention_weights)
    check_cotangent(op, dout, value, sampling_locations)
    check_levels(op, value, *levels)
    b, s, h, c = value.shape
    weights = attention_weights.to(wide(value.dtype))
    g = dout.to(weights.dtype).unflatten(2, (h, c)).unsqueeze(3)  # (b, q, h, 1, c)
    table = _table(value)
    dtable = torch.zeros_like(table)
    dweights, dx, dy = (torch.zeros_like(weights) for _ in range(3))
    for corner, rows in _corners(value, *levels, sampling_locations):
        seen = table[rows].flatten(3, 4)  # (b, q, h, LP, c)
        dots = (seen @ g.mT).reshape(weights.shape)
        dweights = dweights + corner.weight * dots
        dx = dx + corner.slope_x * dots
        dy = dy + corner.slope_y * dots
        given = (weights * corner.weight).flatten(3).unsqueeze(4) * g
        index = rows.flatten().unsqueeze(1).expand(-1, c)
        dtable = dtable.scatter_add(0, index, given.flatten(0, 3))
    scale = value_spatial_shapes.to(weights.dtype).flip(1)[:, None]  # (W, H), for x and y
    dlocations = torch.stack((dx, dy), -1) * weights.unsqueeze(-1) * scale
    return (
        _plain(dtable.reshape(b, s + 1, h, c)[:, :s], value.dtype),
        _plain(dlocations, sampling_locations.dtype),
        _plain(dweights, attention_weights.dtype),
    )


def _table(value: Tensor) -> Tensor:
    """A row of c channels for each head of each position, and of one more, which is zero."""
    wider = value.to(wide(value.dtype))
    return torch.nn.functional.pad(wider, (0, 0, 0, 0, 0, 1)).flatten(0, 2)


def _corners(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor
) -> Iterator[tuple[Corner, Tensor]]:
    """Corners of all points, (b, q, h, L, P), each with the rows of `_table` that they are."""
    b, s, h, _ = value.shape
    height, width = shapes[:, :1], shapes[:, 1:]
    wider = locations.to(wide(value.dtype))
    batch = torch.arange(b, device=value.device).reshape(-1, 1, 1, 1, 1)
    head = torch.arange(h, device=value.device).reshape(-1, 1, 1)
    for corner in corners(wider[..., 0] * width - 0.5, wider[..., 1] * height - 0.5, width, height):
        position = torch.where(corner.index < 0, s, corner.index + starts[:, None])
        yield corner, (batch * (s + 1) + position) * h + head


def _plain(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype).clone(memory_format=torch.contiguous_format)
