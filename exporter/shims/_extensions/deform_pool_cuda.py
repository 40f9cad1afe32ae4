"""Stands in for `deform_pool_cuda`, the extension of mmdetection before 1.1, and its copies.

Its functions write into what they are given; see `_psroi` for the arguments.
"""

from torch import Tensor

from fuseport.exporter.shims._psroi import psroi_pooling, psroi_pooling_gradients

__all__ = ["deform_psroi_pooling_cuda_backward", "deform_psroi_pooling_cuda_forward"]


def deform_psroi_pooling_cuda_forward(
    input: Tensor,
    bbox: Tensor,
    trans: Tensor,
    out: Tensor,
    top_count: Tensor,
    no_trans: bool,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int,
    sample_per_part: int,
    trans_std: float,
) -> None:
    """Writes (n, o, P, P) to `out`, and how many samples counted to `top_count`."""
    pooled, count = psroi_pooling(
        input,
        bbox,
        trans,
        bool(no_trans),
        spatial_scale,
        output_dim,
        group_size,
        pooled_size,
        part_size,
        sample_per_part,
        trans_std,
    )
    out.copy_(pooled)
    top_count.copy_(count)


def deform_psroi_pooling_cuda_backward(
    out_grad: Tensor,
    input: Tensor,
    bbox: Tensor,
    trans: Tensor,
    top_count: Tensor,
    input_grad: Tensor,
    trans_grad: Tensor,
    no_trans: bool,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int,
    sample_per_part: int,
    trans_std: float,
) -> None:
    """Adds to `input_grad` and `trans_grad`."""
    dinput, dtrans = psroi_pooling_gradients(
        out_grad,
        input,
        bbox,
        trans,
        bool(no_trans),
        spatial_scale,
        output_dim,
        group_size,
        pooled_size,
        part_size,
        sample_per_part,
        trans_std,
    )
    input_grad.add_(dinput)
    trans_grad.add_(dtrans)
