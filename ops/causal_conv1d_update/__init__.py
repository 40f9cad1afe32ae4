"""A decoding step of the causal convolution: few inputs, and a state of those before them.

Signature and semantics follow the extension that models in the wild call (github.com/Dao-AILab/
causal-conv1d, `causal_conv1d_update`), so that those models work unchanged.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.causal_conv1d_update import reference, shapes
from fuseport.ops.causal_conv1d_update.cases import BENCH, BUGS, CASES
from fuseport.ops.checks import require
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "causal_conv1d_update"]


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Convolves the next inputs, and updates the state; b batch, d channels, W filter width.

    out is that of `causal_conv1d` over x, where the inputs before it are those in the state.

    Args:
        x: (b, d), or (b, d, l) for several steps: float16, bfloat16, float32 or float64.
        conv_state: (b, d, S) for S ≥ W-1, x's dtype: the S inputs before x, the last one last.
            It is updated in place.
        weight: (d, W) for any W ≥ 1, in x's dtype, or float32 where x is of a half type.
        bias: (d,), weight's dtype, or None.
        activation: None, "silu" or "swish"; the latter two are the same.
        cache_seqlens: (b,), int32, or None. With it the state is a circular buffer: the input of
            step n, counted from the first of a sequence, is in slot n mod S, and cache_seqlens
            steps have been before x. S is 1 or more then. Of more inputs than there are slots the
            last are kept.

    Returns:
        out, contiguous, of x's shape and dtype. It cannot be differentiated, and says so.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    op = "causal_conv1d_update"
    known = activation in (None, "silu", "swish")
    require(known, op, "activation", "None, 'silu' or 'swish'", repr(activation))
    silu = activation is not None
    require(x.dim() in (2, 3), op, "x", "(b, d) or (b, d, l)", tuple(x.shape))
    if bias is None:
        bias = torch.zeros(weight.shape[:1], dtype=weight.dtype, device=weight.device)
    steps = x.unsqueeze(2) if x.dim() == 2 else x
    operators = torch.ops.fuseport
    if cache_seqlens is None:
        out, new_state = operators.causal_conv1d_update(steps, conv_state, weight, bias, silu)
    else:
        out, new_state = operators.causal_conv1d_update_circular(
            steps, conv_state, cache_seqlens, weight, bias, silu
        )
    conv_state.copy_(new_state)
    result: Tensor = out.squeeze(2) if x.dim() == 2 else out
    return result


SPEC = OpSpec(
    name="causal_conv1d_update",
    package=__name__,
    function=causal_conv1d_update,
    operators=(
        Operator(
            name="causal_conv1d_update",
            schema="(Tensor x, Tensor conv_state, Tensor weight, Tensor bias, bool silu) "
            "-> (Tensor out, Tensor new_state)",
            reference=reference.causal_conv1d_update,
            fake=shapes.fake_update,
        ),
        Operator(
            name="causal_conv1d_update_circular",
            schema="(Tensor x, Tensor conv_state, Tensor cache_seqlens, Tensor weight, "
            "Tensor bias, bool silu) -> (Tensor out, Tensor new_state)",
            reference=reference.causal_conv1d_update_circular,
            fake=shapes.fake_circular,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=("causal_conv1d_update",),
    bench=BENCH,
)
