"""The rotary embedding as ONNX: standard operators, and no node of its own.

From opset 23 on, `RotaryEmbedding` would be it: `<interleaved, rotary_embedding_dim = r>` (x, cos,
sin), for cos and sin of (b, l, r/2) and x's dtype.
"""

from collections.abc import Callable
from typing import Any

from onnx import FunctionProto

from fuseport.ops.onnx_bodies import DOMAIN, VERSION
from fuseport.ops.rotary_embedding import reference

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form in plain torch, which torch translates."""
    return {
        "rotary_embedding": reference.rotary_embedding,
        "rotary_embedding_backward": reference.rotary_embedding_backward,
    }


def functions(opset: int) -> list[FunctionProto]:
    """None: there are no nodes to give a body to."""
    del opset
    return []
