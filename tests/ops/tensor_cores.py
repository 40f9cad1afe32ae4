"""Cases that CUDA kernels compute on tensor cores, which the chunked scan has but for float64."""

import torch

from fuseport.ops.spec import Case
from fuseport.ops.ssd_chunk_scan.cases import _Shape, offset

__all__ = ["CHUNKED"]

# Whole tiles, parts of tiles and of segments, rows that cannot be copied at once.
_SHAPES = {
    "tiles": _Shape(b=1, l=130, H=2, P=64, N=128, gated=True),
    "parts_of_tiles": _Shape(l=70, H=2, P=70, N=65, G=2, gated=True),
    "segments": _Shape(b=1, l=705, H=2, P=17, N=8),
    "packed_segments": _Shape(b=1, l=600, P=8, N=72, packed=((0, 0), (1, 3), (2, 192), (3, 590))),
    "wide_heads": _Shape(b=1, l=66, H=2, P=128, N=72),
    "parts_of_wide_heads": _Shape(b=1, l=66, H=2, P=133, N=8, packed=((0, 0), (0, 40))),
    "more_states": _Shape(b=1, l=66, H=2, P=70, N=256, gated=True),
    "parts_of_more_states": _Shape(b=1, l=520, H=1, P=9, N=131, packed=((0, 0), (0, 200))),
    "offset": _Shape(
        b=1, l=66, P=18, N=20, gated=True, layouts=dict.fromkeys(("x", "B", "C", "z"), offset)
    ),
}

CHUNKED = tuple(
    Case(
        f"tensor_cores_{name}",
        "ssd_chunk_scan_gated" if shape.gated else "ssd_chunk_scan",
        shape.make,
        (torch.float32, torch.bfloat16, torch.float16),
    )
    for name, shape in _SHAPES.items()
)
