"""The sum of walks and its backward as ONNX; `cross_scan.onnx` has the bodies of the nodes."""

from collections.abc import Callable
from typing import Any

from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.cross_scan.onnx import (
    merge_function,
    merge_node,
    scan_function,
    scan_node,
)
from fuseport.ops.onnx_bodies import DOMAIN, VERSION

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"cross_merge": _merge, "cross_merge_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return [merge_function("cross_merge", opset), scan_function("cross_merge_backward", opset)]


def _merge(ys: Tensor) -> Tensor:
    return merge_node("cross_merge", ys)


def _backward(dout: Tensor) -> Tensor:
    return scan_node("cross_merge_backward", dout)
