"""Cases that CUDA kernels compute on tensor cores, for which ops take many steps at once."""

import torch
from torch import Tensor

from fuseport.ops.case_layouts import expanded_time, transposed
from fuseport.ops.gated_delta_rule.cases import _ALL
from fuseport.ops.gated_delta_rule.cases import _Shape as _Rule
from fuseport.ops.spec import Case
from fuseport.ops.ssd_chunk_scan.cases import _Shape, offset

__all__ = ["CHUNKED", "RULES"]

# Whole tiles, parts of tiles and of segments, rows that cannot be copied at once.
_SHAPES = {
    "tiles": _Shape(b=1, l=130, H=2, P=64, N=128, gated=True),
    "parts_of_tiles": _Shape(l=70, H=2, P=70, N=65, G=2, gated=True),
    "segments": _Shape(b=1, l=705, H=2, P=17, N=8),
    "packed_segments": _Shape(
        b=1, l=600, H=1, P=8, N=72, packed=((0, 0), (1, 3), (2, 192), (3, 590))
    ),
    "wide_heads": _Shape(b=1, l=66, H=2, P=128, N=72),
    "parts_of_wide_heads": _Shape(b=1, l=66, H=2, P=133, N=8, packed=((0, 0), (0, 40))),
    "more_states": _Shape(b=1, l=66, H=2, P=70, N=256, gated=True),
    "parts_of_more_states": _Shape(b=1, l=520, H=1, P=9, N=131, packed=((0, 0), (0, 200))),
    "offset": _Shape(
        b=1, l=66, P=18, N=20, gated=True, layouts=dict.fromkeys(("x", "B", "C", "z"), offset)
    ),
    "discrete_parts_of_tiles": _Shape(l=70, H=2, P=70, N=65, G=2, discrete=True),
    "discrete_packed_segments": _Shape(
        b=1, l=600, H=1, P=8, N=72, packed=((0, 0), (1, 3), (2, 192), (3, 590)), discrete=True
    ),
}

CHUNKED = tuple(
    Case(
        f"tensor_cores_{name}",
        shape.operator,
        shape.make,
        (torch.float32, torch.bfloat16, torch.float16),
    )
    for name, shape in _SHAPES.items()
)


def cut_off(g: Tensor) -> Tensor:
    """Some steps forget everything, to the bit or beyond, and others nothing."""
    g = g * 0
    g[:, 3::17], g[:, 20], g[:, 66:69] = -1e4, -torch.inf, -88.0
    return g


_FORGETS_NOTHING = {"g": torch.zeros_like, "beta": torch.ones_like}
_RULES = {
    "tiles": _Rule(b=1, l=130, G=1, H=1, K=128, V=32),
    "parts_of_tiles": _Rule(b=1, l=70, G=1, H=2, K=33, V=70, layouts={"q": offset, "v": offset}),
    "spans": _Rule(b=2, l=260, G=2, H=2, K=8, V=9, forgets=-5.0),
    "one_key": _Rule(b=1, l=128, G=1, H=1, K=24, V=9, layouts={"k": expanded_time}),
    "one_key_for_ever": _Rule(
        b=1, l=128, G=1, H=1, K=24, V=9, layouts={**_FORGETS_NOTHING, "k": expanded_time}
    ),
    "forgets_nothing": _Rule(b=1, l=190, G=1, H=1, K=16, V=9, layouts=_FORGETS_NOTHING),
    "cut_off": _Rule(b=1, l=140, G=1, H=1, K=16, V=16, layouts={"g": cut_off}),
    # Gradients of decays are small differences of what they could be made of.
    "forgets": _Rule(b=1, l=100, G=1, H=3, K=20, V=33, forgets=3.0),
    "transposed": _Rule(b=1, l=66, G=1, H=2, K=9, V=12, layouts=dict.fromkeys(_ALL, transposed)),
    "without_rates": _Rule(b=1, l=65, G=1, H=2, K=12, V=9, layouts={"beta": torch.zeros_like}),
}

RULES = tuple(
    Case(
        f"tensor_cores_{name}",
        "gated_delta_rule",
        shape.make,
        (torch.float32, torch.bfloat16, torch.float16),
    )
    for name, shape in _RULES.items()
)
