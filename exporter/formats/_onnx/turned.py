"""Matrices that a Gemm takes turned.

In the graph of a Scan or an If, ONNX Runtime, 1.31 at least, leaves out what turns them and has a
Gemm turn them by itself, which it then forgets to be of the same graph: what else the Gemm takes,
or was turned, is gone where the graph returns it, too.
"""

import onnx_ir as ir

__all__ = ["turned_by_themselves"]


def turned_by_themselves(model: ir.Model) -> None:
    """Have each Gemm in such a graph turn its matrices by itself."""
    for node in model.graph.all_nodes():
        if node.op_type == "Gemm" and not node.domain and node.graph is not model.graph:
            _turn(node, 0, "transA")
            _turn(node, 1, "transB")


def _turn(gemm: ir.Node, place: int, turned: str) -> None:
    matrix = gemm.inputs[place]
    node = None if matrix is None else matrix.producer()
    while node is not None and node.op_type == "Transpose" and not node.domain:
        if list(node.attributes.get_ints("perm", [1, 0])) == [1, 0]:
            once = 1 - gemm.attributes.get_int(turned, 0)
            gemm.attributes[turned] = ir.AttrInt64(turned, once)
        matrix = node.inputs[0]
        node = None if matrix is None else matrix.producer()
    gemm.replace_input_with(place, matrix)
