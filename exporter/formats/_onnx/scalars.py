"""Operators of tensors of a lower rank than ONNX's take.

Along a dimension of tensors that have none torch takes them as it does one element, and a sample
as it does a batch of one.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["of_higher_rank"]

aten = torch.ops.aten

_ALONG = {
    *(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two),
    *(aten.amax.default, aten.amin.default, aten.aminmax.default, aten.topk.default),
    *(aten.all.dim, aten.all.dims, aten.any.dim, aten.any.dims, aten.prod.dim_int),
    *(aten.linalg_vector_norm.default, aten.mean.dim),
    *(aten.std.dim, aten.std.correction, aten.std_mean.dim, aten.std_mean.correction),
    *(aten.var.dim, aten.var.correction, aten.var_mean.dim, aten.var_mean.correction),
}


_OF_SAMPLES = {aten.im2col.default: 3, aten.col2im.default: 2}
"""Those that take a sample alone, with its rank."""


def of_higher_rank(node: fx.Node) -> Any:
    """What computes the same as `node` does, of one element or one sample; None where that is not
    needed."""
    values: list[Any] = [n.meta.get("val") for n in node.all_input_nodes]
    target: Any = node.target
    if target in _OF_SAMPLES and values[0].dim() == _OF_SAMPLES[target]:
        return lambda x, *args: target(x.unsqueeze(0), *args).squeeze(0)
    if node.target not in _ALONG or not any(_is_scalar(value) for value in values):
        return None
    return partial(_called, node.target)


def _called(target: Any, *args: Any, **kwargs: Any) -> Any:
    rows = [a.reshape(1) if _is_scalar(a) else a for a in args]
    found = target(*rows, **kwargs)
    if isinstance(found, Tensor):
        return found.reshape(())
    return tuple(each.reshape(()) for each in found)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
