"""Deformable position-sensitive pooling of regions, in plain torch.

Dai et al., "Deformable convolutional networks", 2017, section 2.2, as its extensions compute it.
"""

import torch
from torch import Tensor

__all__ = ["psroi_pooling", "psroi_pooling_gradients"]

_LEAST = 0.1  # the width and height of a region, in pixels of the map


def psroi_pooling(
    input: Tensor,
    rois: Tensor,
    trans: Tensor,
    no_trans: bool,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int,
    sample_per_part: int,
    trans_std: float,
) -> tuple[Tensor, Tensor]:
    """Average bilinear samples of each bin of each region; n regions, o channels, P bins a side.

    Bin (i, j) of channel k is pooled from channel (k·G + gi)·G + gj of input, with gi = ⌊i·G/P⌋ and
    gj likewise. It is moved by `trans` times `trans_std`, in widths and heights of the region. Of
    its samples, those count that are no more than half a pixel outside.

    Args:
        input: (b, c, H, W), with c ≥ o·G².
        rois: (n, 5): the index of the batch entry, then left, top, right and bottom, in pixels of
            the picture, which are rounded.
        trans: (n, 2·classes, part_size, part_size): moves across and down, where o/classes
            channels have the same; any if `no_trans`.
        no_trans: whether bins stay where they are.
        spatial_scale: of a pixel of the picture, in those of input.
        output_dim: o.
        group_size: G.
        pooled_size: P.
        part_size: of `trans`.
        sample_per_part: S; a bin has S² samples.
        trans_std: see above.

    Returns:
        (n, o, P, P), and how many samples counted, likewise.

    Raises:
        ValueError: there are too few channels, or the classes do not divide o.
    """
    _, channels, height, width = input.shape
    if channels < output_dim * group_size**2:
        raise ValueError(
            f"psroi_pooling: {output_dim} channels of {group_size}×{group_size} groups want "
            f"{output_dim * group_size**2} channels of input, not {channels}"
        )
    bins = torch.arange(pooled_size, device=input.device)
    corners = rois[:, 1:].sign() * (rois[:, 1:].abs() + 0.5).floor()  # halves away from zero
    left, top = corners[:, :2].mul(spatial_scale).sub(0.5).unbind(1)
    right, bottom = corners[:, 2:].add(1).mul(spatial_scale).sub(0.5).unbind(1)
    moved = _moves(trans, no_trans, output_dim, pooled_size, part_size, bins)
    # Both (n, o, P, P, S): places of samples across and down.
    x, x_counts = _places(left, right, bins, moved[0] * trans_std, sample_per_part, width)
    y, y_counts = _places(top, bottom, bins[:, None], moved[1] * trans_std, sample_per_part, height)
    counted = (y_counts[..., :, None] & x_counts[..., None, :]).to(input.dtype)
    groups = (bins * group_size).div(pooled_size, rounding_mode="floor")
    first = torch.arange(output_dim, device=input.device)[:, None, None] * group_size
    channel = (first + groups[:, None]) * group_size + groups  # (o, P, P)
    plane = (rois[:, 0].long()[:, None, None, None] * channels + channel)[..., None, None]
    flat = input.reshape(-1)

    def at(row: Tensor, column: Tensor) -> Tensor:
        return flat[(plane * height + row[..., :, None]) * width + column[..., None, :]]

    x_low, x_high, y_low, y_high = x.floor(), x.ceil(), y.floor(), y.ceil()
    across, down = (x - x_low)[..., None, :], (y - y_low)[..., :, None]
    x0, x1, y0, y1 = (place.long() for place in (x_low, x_high, y_low, y_high))
    above = at(y0, x0) * (1 - across) + at(y0, x1) * across
    below = at(y1, x0) * (1 - across) + at(y1, x1) * across
    samples = (above * (1 - down) + below * down) * counted
    total = samples.sum((-2, -1))
    count = counted.sum((-2, -1)).expand_as(total).contiguous()
    return total / count.clamp(min=1), count


def psroi_pooling_gradients(
    dout: Tensor,
    input: Tensor,
    rois: Tensor,
    trans: Tensor,
    no_trans: bool,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int,
    sample_per_part: int,
    trans_std: float,
) -> tuple[Tensor, Tensor]:
    """Those of input and trans, by that of the outputs; arguments are those of `psroi_pooling`."""
    with torch.enable_grad():
        given = input.detach().requires_grad_(), trans.detach().requires_grad_()
        out, _ = psroi_pooling(
            given[0],
            rois,
            given[1],
            no_trans,
            spatial_scale,
            output_dim,
            group_size,
            pooled_size,
            part_size,
            sample_per_part,
            trans_std,
        )
        dinput, dtrans = torch.autograd.grad(out, given, dout, materialize_grads=True)
    return dinput, dtrans


def _moves(
    trans: Tensor, no_trans: bool, output_dim: int, pooled_size: int, part_size: int, bins: Tensor
) -> tuple[Tensor, Tensor]:
    """Across and down, both (n, o, P, P), or of sizes 1 where nothing moves."""
    if no_trans:
        still = trans.new_zeros(1, 1, 1, 1)
        return still, still
    classes = trans.shape[1] // 2
    if output_dim % classes:
        raise ValueError(
            f"psroi_pooling: {classes} classes of trans do not divide {output_dim} channels"
        )
    parts = (bins * part_size).div(pooled_size, rounding_mode="floor")
    picked = trans.index_select(2, parts).index_select(3, parts)
    across, down = picked.unflatten(1, (classes, 2)).unbind(2)
    each = output_dim // classes
    return across.repeat_interleave(each, 1), down.repeat_interleave(each, 1)


def _places(
    begin: Tensor, end: Tensor, bins: Tensor, moved: Tensor, samples: int, size: int
) -> tuple[Tensor, Tensor]:
    """Places of samples along one dimension of `size` pixels, and whether each counts."""
    length = (end - begin).clamp(min=_LEAST)[:, None, None, None]
    bin_size = length / bins.numel()
    start = bins * bin_size + begin[:, None, None, None] + moved * length
    steps = torch.arange(samples, device=begin.device)
    place = start[..., None] + steps * (bin_size / samples)[..., None]
    counts = (place >= -0.5) & (place <= size - 0.5)
    return place.clamp(min=0).clamp(max=size - 1), counts
