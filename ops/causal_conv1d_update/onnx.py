"""A decoding step as ONNX: standard operators, and no node of its own.

It works on few and small tensors.
"""

from collections.abc import Callable
from typing import Any

from onnx import FunctionProto

from fuseport.ops.causal_conv1d_update import reference
from fuseport.ops.onnx_bodies import DOMAIN, VERSION

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form in plain torch, which torch translates."""
    return {
        "causal_conv1d_update": reference.causal_conv1d_update,
        "causal_conv1d_update_circular": reference.causal_conv1d_update_circular,
    }


def functions(opset: int) -> list[FunctionProto]:
    """None: there are no nodes to give a body to."""
    del opset
    return []
