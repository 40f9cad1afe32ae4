"""Four walks over an image, for scans that know one direction only; `cross_merge` undoes them.

Source: Liu et al., "VMamba: Visual state space model", 2024, section 4.2; signature and semantics
follow its code (github.com/MzeroMiko/VMamba, `CrossScan`), so that models of it work unchanged.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.cross_scan import reference, shapes
from fuseport.ops.cross_scan.cases import BUGS, CASES
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "cross_scan"]


def cross_scan(x: Tensor) -> Tensor:
    """The pixels of each channel in four orders: by rows, by columns, and both of these reversed.

    Args:
        x: (b, C, H, W), float16, bfloat16, float32 or float64, in any memory layout.

    Returns:
        (b, 4, C, H·W), contiguous, in x's dtype; differentiable, once.

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    out: Tensor = torch.ops.fuseport.cross_scan(x)
    return out.flatten(3)


SPEC = OpSpec(
    name="cross_scan",
    package=__name__,
    function=cross_scan,
    operators=(
        Operator(
            name="cross_scan",
            schema="(Tensor x) -> Tensor out",
            reference=reference.cross_scan,
            fake=shapes.fake_scan,
            backward="cross_scan_backward",
        ),
        Operator(
            name="cross_scan_backward",
            schema="(Tensor dout) -> Tensor dx",
            reference=reference.cross_scan_backward,
            fake=shapes.fake_scan_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=(
        "cross_scan",
        "CrossScan",
    ),
    lacks={"ONNX native": "no such operator"},
    evidence=(
        Evidence(
            "a scan in four directions, of VMamba",
            {"A_logs": (None, None), "x_proj_weight": (4, None, None)},
        ),
    ),
)
