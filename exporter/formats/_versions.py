"""Nodes inside of others, in the version of the operators that a model is of.

onnxscript 0.7 brings the nodes of a graph there one by one, but not those in the graphs that an If,
Loop or Scan has, where that is of such a version itself.
"""

import onnx_ir as ir

__all__ = ["inside_of_version"]

_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def inside_of_version(model: ir.Model, opset: int) -> None:
    """Say what inner graphs have as that version says it."""
    if opset < 20:
        return
    for graph in model.graph.subgraphs():
        for node in graph:
            mode = node.attributes.get("mode") if node.op_type == "GridSample" else None
            if mode is not None and (name := mode.as_string()) in _MODES:
                node.attributes["mode"] = ir.AttrString("mode", _MODES[name])
