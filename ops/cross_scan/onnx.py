"""Walks over an image as ONNX: nodes of domain `fuseport.ops`, with function bodies.

Bodies use operators that opset 18 has, and that onnx's reference evaluator has too. An attribute of
a node that adds says which type it adds in: 1 for float32, 11 for float64.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed

__all__ = [
    "DOMAIN",
    "VERSION",
    "decompositions",
    "functions",
    "merge_function",
    "merge_node",
    "scan_function",
    "scan_node",
]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"cross_scan": _scan, "cross_scan_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return [scan_function("cross_scan", opset), merge_function("cross_scan_backward", opset)]


def _scan(x: Tensor) -> Tensor:
    return scan_node("cross_scan", x)


def _backward(dout: Tensor) -> Tensor:
    return merge_node("cross_scan_backward", dout)


def scan_node(name: str, x: Tensor) -> Tensor:
    """(b, C, H, W) → (b, 4, C, H, W)."""
    b, channels, height, width = x.shape
    return _node(name, x, {}, (b, 4, channels, height, width))


def merge_node(name: str, ys: Tensor) -> Tensor:
    """(b, 4, C, H, W) → (b, C, H, W)."""
    b, _, channels, height, width = ys.shape
    kind = 11 if ys.dtype == torch.float64 else 1
    return _node(name, ys, {"sum_type": kind}, (b, channels, height, width))


def _node(name: str, t: Tensor, given: dict[str, int], shape: tuple[int, ...]) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{name}", (t,), {**given}, dtype=t.dtype, shape=shape, version=VERSION
    )


def scan_function(name: str, opset: int) -> FunctionProto:
    """The body of a node that walks."""
    return _function(name, "", "(x) => (out)", _SCAN, opset)


def merge_function(name: str, opset: int) -> FunctionProto:
    """The body of a node that sums walks."""
    return _function(name, "<sum_type>", "(ys) => (out)", _MERGE, opset)


def _function(name: str, attributes: str, signature: str, body: str, opset: int) -> FunctionProto:
    return parsed([f"{name} {attributes} {signature} {{ {body} }}"], opset)[0]


_ENDS = """
        one = Constant <value_ints = [1]> ()
        two = Constant <value_ints = [2]> ()
        three = Constant <value_ints = [3]> ()
        four = Constant <value_ints = [4]> ()
        last = Constant <value_ints = [-1]> ()
        before_first = Constant <value_ints = [-9223372036854775807]> ()
"""

_SCAN = (
    _ENDS
    + """
        batch = Shape <start = 0, end = 1> (x)
        image = Shape <start = 1> (x)
        channels = Shape <start = 1, end = 2> (x)
        height = Shape <start = 2, end = 3> (x)
        width = Shape <start = 3> (x)
        pixels = Mul(height, width)
        one_walk = Concat <axis = 0> (batch, one, channels, pixels)
        by_rows = Reshape <allowzero = 1> (x, one_walk)
        turned = Transpose <perm = [0, 1, 3, 2]> (x)
        by_columns = Reshape <allowzero = 1> (turned, one_walk)
        ahead = Concat <axis = 1> (by_rows, by_columns)
        back = Slice(ahead, last, before_first, three, last)
        both = Concat <axis = 1> (ahead, back)
        shape = Concat <axis = 0> (batch, four, image)
        out = Reshape <allowzero = 1> (both, shape)
"""
)

_MERGE = (
    _ENDS
    + """
        zero = Constant <value_ints = [0]> ()
        wide = Cast <to: int = @sum_type> (ys)
        batch = Shape <start = 0, end = 1> (ys)
        channels = Shape <start = 2, end = 3> (ys)
        height = Shape <start = 3, end = 4> (ys)
        width = Shape <start = 4> (ys)
        pixels = Mul(height, width)
        four_walks = Concat <axis = 0> (batch, four, channels, pixels)
        flat = Reshape <allowzero = 1> (wide, four_walks)
        ahead = Slice(flat, zero, two, one)
        reversed = Slice(flat, two, four, one)
        back = Slice(reversed, last, before_first, three, last)
        sums = Add(ahead, back)
        rows_flat = Slice(sums, zero, one, one)
        columns_flat = Slice(sums, one, two, one)
        shape = Concat <axis = 0> (batch, channels, height, width)
        by_rows = Reshape <allowzero = 1> (rows_flat, shape)
        turned_shape = Concat <axis = 0> (batch, channels, width, height)
        turned = Reshape <allowzero = 1> (columns_flat, turned_shape)
        by_columns = Transpose <perm = [0, 1, 3, 2]> (turned)
        total = Add(by_rows, by_columns)
        out = CastLike(total, ys)
"""
)
