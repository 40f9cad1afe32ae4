"""Rotary position embedding: pairs of channels, turned by angles that depend on the position.

Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021, equation
34. Which channels are a pair differs between models: a channel of the first half and one of the
second (Llama, GPT-NeoX), or neighbours (GPT-J, RoFormer itself).
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.evidence import Evidence
from fuseport.ops.rotary_embedding import reference, shapes
from fuseport.ops.rotary_embedding.cases import BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "rotary_embedding"]


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turns pairs (a, b) of the first r channels to (a·cos - b·sin, b·cos + a·sin).

    It is computed in float32, or float64 for a float64 `x`, and rounded once.

    Args:
        x: (b, h, l, p), float16, bfloat16, float32 or float64, in any memory layout: b batch, h
            heads, l positions, p channels.
        cos: (l, r/2), (b, l, r/2) or (1, l, r/2), for r ≤ p, of each pair's angle; in x's dtype, or
            float32 beside a half type. Of tables of width r that repeat each angle, as those of
            transformers do, it is the half `cos[..., : r // 2]`; interleaved, `cos[..., ::2]`.
        sin: as cos.
        interleaved: pairs are channels 2i and 2i + 1; else i and i + r/2.

    Returns:
        (b, h, l, p), contiguous, in x's dtype, channels from r on as they were; differentiable,
        once, in `x`, `cos` and `sin`.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    for_all = cos.dim() == 3 and sin.dim() == 3 and cos.shape[0] == 1 and sin.shape[0] == 1
    if for_all:
        cos, sin = cos[0], sin[0]
    out: Tensor = torch.ops.fuseport.rotary_embedding(x, cos, sin, interleaved)
    return out


SPEC = OpSpec(
    name="rotary_embedding",
    package=__name__,
    function=rotary_embedding,
    operators=(
        Operator(
            name="rotary_embedding",
            schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor out",
            reference=reference.rotary_embedding,
            fake=shapes.fake_rotary,
            backward="rotary_embedding_backward",
        ),
        Operator(
            name="rotary_embedding_backward",
            schema="(Tensor dout, Tensor x, Tensor cos, Tensor sin, bool interleaved) "
            "-> (Tensor dx, Tensor dcos, Tensor dsin)",
            reference=reference.rotary_embedding_backward,
            fake=shapes.fake_rotary_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=(
        "rotary_emb",
        "apply_rotary",
        "ApplyRotary",
        "rotary_kernel",
    ),
    evidence=(Evidence("rotary positions", {"rotary*.inv_freq": (None,)}),),
)
