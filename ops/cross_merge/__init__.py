"""The sum of four walks over an image at each pixel: what undoes `cross_scan`.

Source: Liu et al., "VMamba: Visual state space model", 2024, section 4.2; signature and semantics
follow its code (github.com/MzeroMiko/VMamba, `CrossMerge`), so that models of it work unchanged.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.checks import require, require_shape
from fuseport.ops.cross_merge import reference, shapes
from fuseport.ops.cross_merge.cases import CASES
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "cross_merge"]


def cross_merge(ys: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
    """Puts four walks back into the order of rows, and adds them up.

    A sum is of float32 at least, and rounded once.

    Args:
        ys: (b, 4, C, H, W), or (b, 4, C, H·W) with `height` and `width`: walks by rows, by columns,
            and both of these reversed, each in its own order. float16, bfloat16, float32 or
            float64, in any memory layout.
        height, width: H and W, where ys does not say them; else None, or the same.

    Returns:
        (b, C, H·W), contiguous, in ys's dtype; differentiable, once.

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    op = "cross_merge"
    if ys.dim() == 4:
        known = height is not None and width is not None
        require(known, op, "height, width", "given beside ys of 4 dimensions", (height, width))
        assert height is not None
        assert width is not None
        given = (*ys.shape[:3], height * width)
        require_shape(op, "ys", ys, "(b, 4, C, height * width)", given)
        # `view` cannot infer nor `unflatten` make sizes of what is empty.
        ys = ys.reshape(*ys.shape[:3], height, width)
    else:
        require(ys.dim() == 5, op, "ys", "(b, 4, C, H, W) or (b, 4, C, H*W)", tuple(ys.shape))
        require(height in (None, ys.shape[3]), op, "height", f"{ys.shape[3]}", height)
        require(width in (None, ys.shape[4]), op, "width", f"{ys.shape[4]}", width)
    out: Tensor = torch.ops.fuseport.cross_merge(ys)
    return out.flatten(2)


SPEC = OpSpec(
    name="cross_merge",
    package=__name__,
    function=cross_merge,
    operators=(
        Operator(
            name="cross_merge",
            schema="(Tensor ys) -> Tensor out",
            reference=reference.cross_merge,
            fake=shapes.fake_merge,
            backward="cross_merge_backward",
        ),
        Operator(
            name="cross_merge_backward",
            schema="(Tensor dout) -> Tensor dys",
            reference=reference.cross_merge_backward,
            fake=shapes.fake_merge_backward,
        ),
    ),
    cases=CASES,
    stands_for=(
        "cross_merge",
        "CrossMerge",
    ),
    lacks={"ONNX native": "no such operator"},
    evidence=(
        Evidence(
            "a scan in four directions, of VMamba",
            {"A_logs": (None, None), "x_proj_weight": (4, None, None)},
        ),
    ),
)
