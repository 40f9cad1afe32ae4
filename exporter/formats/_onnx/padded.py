"""What is padded, and pooled then.

ONNX Runtime, 1.31 at least, has the pool pad by itself, whose own padding is no zeros: the largest
of a window of negative numbers is one of these then. And a pool refuses to pad by a whole window.
"""

import numpy as np
import onnx_ir as ir

__all__ = ["padded_apart"]

_POOLS = ("MaxPool", "AveragePool")


def padded_apart(model: ir.Model) -> None:
    """Have each Pad that a pool takes name the axes, which it is not left out with."""
    for node in tuple(model.graph.all_nodes()):
        pad = node.inputs[0].producer() if node.op_type in _POOLS and node.inputs[0] else None
        if pad is not None and pad.op_type == "Pad" and len(pad.inputs) < 4:
            _name_axes(pad)


def _name_axes(pad: ir.Node) -> None:
    whole = pad.inputs[0]
    rank = None if whole is None or whole.shape is None else len(whole.shape)
    if rank is None or pad.graph is None:
        return
    axes = ir.node("Constant", [], {"value": ir.tensor(np.arange(rank))})
    pad.graph.insert_before(pad, axes)
    pad.resize_inputs(4)
    pad.replace_input_with(3, axes.outputs[0])
