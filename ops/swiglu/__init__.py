"""SwiGLU: a gate through SiLU, times what it gates.

Source: Shazeer, "GLU variants improve transformer", 2020, equation 6, after the projections.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec
from fuseport.ops.swiglu import reference, shapes
from fuseport.ops.swiglu.cases import BUGS, CASES

__all__ = ["SPEC", "swiglu"]


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SiLU(gate) · up, where SiLU(g) = g / (1 + exp(-g)).

    It is computed in float32, or float64 for a float64 `gate`, and rounded once.

    Args:
        gate: (…, d), float16, bfloat16, float32 or float64, in any memory layout. Without `up`,
            (…, 2d): the gate in the first half of each row, what it gates in the second, as a
            projection that makes both leaves them.
        up: (…, d), gate's shape and dtype, or None.

    Returns:
        (…, d), contiguous, in gate's dtype; differentiable, once.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    operators = torch.ops.fuseport
    out: Tensor = operators.swiglu_packed(gate) if up is None else operators.swiglu(gate, up)
    return out


SPEC = OpSpec(
    name="swiglu",
    package=__name__,
    function=swiglu,
    operators=(
        Operator(
            name="swiglu",
            schema="(Tensor gate, Tensor up) -> Tensor out",
            reference=reference.swiglu,
            fake=shapes.fake_swiglu,
            backward="swiglu_backward",
        ),
        Operator(
            name="swiglu_backward",
            schema="(Tensor dout, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)",
            reference=reference.swiglu_backward,
            fake=shapes.fake_swiglu_backward,
        ),
        Operator(
            name="swiglu_packed",
            schema="(Tensor x) -> Tensor out",
            reference=reference.swiglu_packed,
            fake=shapes.fake_packed,
            backward="swiglu_packed_backward",
        ),
        Operator(
            name="swiglu_packed_backward",
            schema="(Tensor dout, Tensor x) -> Tensor dx",
            reference=reference.swiglu_packed_backward,
            fake=shapes.fake_packed_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=(
        "swiglu",
        "SwiGLU",
    ),
    lacks={"ONNX native": "SwiGLU: opset 28"},
    evidence=(
        Evidence(
            "a gated feed-forward layer",
            {
                "gate_proj.weight": (None, None),
                "up_proj.weight": (None, None),
                "down_proj.weight": (None, None),
            },
        ),
        Evidence(
            "a gated feed-forward layer",
            {"w1.weight": (None, None), "w2.weight": (None, None), "w3.weight": (None, None)},
        ),
    ),
)
