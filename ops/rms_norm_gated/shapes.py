"""Shapes, dtypes and strides of the outputs of a gated norm; `rms_norm.shapes` has the checks."""

from torch import Tensor

from fuseport.ops.rms_norm.shapes import check, check_backward, flat, outputs

__all__ = ["fake_norm_gated", "fake_norm_gated_backward"]


def fake_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::rms_norm_gated`."""
    check("rms_norm_gated", x, z, weight, eps, group_size)
    return outputs(x, group_size)


def fake_norm_gated_backward(
    dout: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fuseport::rms_norm_gated_backward`."""
    check("rms_norm_gated_backward", x, z, weight, eps, group_size)
    check_backward("rms_norm_gated_backward", dout, x, rstd, group_size)
    return flat(x), flat(z), flat(weight)
