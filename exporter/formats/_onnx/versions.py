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
        for node in tuple(graph):
            if node.op_type == "GridSample":
                _name_mode(node)
            elif node.op_type == "DFT" and len(node.inputs) < 3:
                _give_axis(graph, node)


def _name_mode(node: ir.Node) -> None:
    mode = node.attributes.get("mode")
    if mode is not None and (name := mode.as_string()) in _MODES:
        node.attributes["mode"] = ir.AttrString("mode", _MODES[name])


def _give_axis(graph: ir.Graph, node: ir.Node) -> None:
    """Have a transform take its axis as an input; it is the second where the node says none."""
    attributes = {name: each for name, each in node.attributes.items() if name != "axis"}
    number = ir.tensor(node.attributes.get_int("axis", 1), dtype=ir.DataType.INT64)
    axis = ir.node("Constant", [], {"value": number})
    x, length = (*node.inputs, None)[:2]
    transform = ir.node("DFT", [x, length, axis.outputs[0]], attributes)
    old, new = node.outputs[0], transform.outputs[0]
    new.type, new.shape = old.type, old.shape
    graph.insert_before(node, (axis, transform))
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
