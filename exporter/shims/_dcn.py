"""Deformable convolution of pixels in groups of channels, as InternImage's extensions have it."""

import torch
from torch import Tensor

from fuseport.ops.ms_deform_attn import ms_deform_attn

__all__ = ["dcnv3_forward"]


def dcnv3_forward(
    input: Tensor,
    offset: Tensor,
    mask: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    im2col_step: int,
    remove_center: int = 0,
) -> Tensor:
    """Sum bilinear samples of each group of channels, weighted by its mask; G groups, P taps.

    Wang et al., "InternImage: Exploring large-scale vision foundation models with deformable
    convolutions", 2023, equation 2. Taps go column by column; tap (i, j) is at
    (j·dilation + dy)·scale from that of the first row, which the scale moves away from the middle
    one, and likewise across. It is deformable attention on one map, G heads and P points.

    Args:
        input: (b, H, W, G·c), of a dtype of `fuseport.ops.ms_deform_attn`.
        offset: (b, oh, ow, G·P·2), dx and dy in turn.
        mask: (b, oh, ow, G·P).
        kernel_h: rows of taps; P is kernel_h·kernel_w, or one less.
        kernel_w: columns of them.
        stride_h: of outputs, for rows.
        stride_w: for columns.
        pad_h: by how much the first tap begins outside, for rows.
        pad_w: for columns.
        dilation_h: between taps, for rows.
        dilation_w: for columns.
        group: G.
        group_channels: c.
        offset_scale: see above.
        im2col_step: how many batch entries the extension takes at a time; nothing depends on it.
        remove_center: whether there is no tap in the middle. Version 1.0 has no such argument.

    Returns:
        (b, oh, ow, G·c).
    """
    batch, height, width, _ = input.shape
    _, rows, columns, _ = offset.shape
    wide = torch.promote_types(input.dtype, torch.float32)
    middle = kernel_w // 2, kernel_h // 2
    taps = [(i, j) for i in range(kernel_w) for j in range(kernel_h)]
    if remove_center:
        taps.remove(middle)
    # In pixels of the map, (…, G, P, 2); the first is across, as in offset.
    moved = offset.to(wide).reshape(batch, rows, columns, group, len(taps), 2)
    moved = (moved + moved.new_tensor(taps) * moved.new_tensor([dilation_w, dilation_h])) * (
        offset_scale
    )
    across = _first_taps(columns, stride_w, pad_w, dilation_w * (kernel_w - 1) // 2, offset_scale)
    down = _first_taps(rows, stride_h, pad_h, dilation_h * (kernel_h - 1) // 2, offset_scale)
    x = moved[..., 0] + across.to(moved)[:, None, None]
    y = moved[..., 1] + down.to(moved)[:, None, None, None]
    places = torch.stack([(x + 0.5) / width, (y + 0.5) / height], -1)
    out = ms_deform_attn(
        input.reshape(batch, height * width, group, group_channels),
        torch.tensor([[height, width]], device=input.device),
        torch.zeros(1, dtype=torch.int64, device=input.device),
        places.reshape(batch, rows * columns, group, 1, len(taps), 2),
        mask.to(wide).reshape(batch, rows * columns, group, 1, len(taps)),
    )
    return out.reshape(batch, rows, columns, group * group_channels)


def _first_taps(count: int, stride: int, pad: int, half: int, scale: float) -> Tensor:
    """Where the first tap of each output would be along one dimension, in float64."""
    outputs = torch.arange(count, dtype=torch.float64)
    return outputs * stride + (half - pad - half * scale)
