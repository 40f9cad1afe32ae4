"""Attention under masks, as torch has it: what is hidden from all it may look at, gives zeros.

torch.onnx's form gives the mean of all where the mask is of booleans, and NaN where it is of
numbers, -∞, which `nn.MultiheadAttention` makes of one of booleans.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fuseport.exporter.formats._onnx.none import is_none_ever
from fuseport.exporter.program.regions import nodes
from fuseport.exporter.program.rewriting import Table

__all__ = ["attention"]

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


def attention(exported: ExportedProgram) -> Table:
    """What computes the same as the attentions of a program do.

    Those of rank 4 without a mask, and none of whose products is of sizes that may be 0, are left:
    torch.onnx knows them.
    """
    calls = [node for node in nodes(exported.graph_module) if node.target is _ATTENTION]
    if not calls:
        return {}
    none = any(is_none_ever(x) for call in calls for x in call.args[:2])
    return {_ATTENTION: functools.partial(_attention, none)}


def _attention(
    none: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *more: Any,
    **by: Any,
) -> Any:
    of_numbers = attn_mask is not None and attn_mask.dtype != torch.bool
    if query.dim() == 4 and not none:
        if attn_mask is None:
            return NotImplemented
        if of_numbers and not by.get("enable_gqa"):
            return _under_numbers(query, key, value, attn_mask, by.get("scale"))
    if attn_mask is not None and not of_numbers:
        allowed = attn_mask
        attn_mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, -math.inf)
    attend = aten._scaled_dot_product_attention_math.default
    return attend(query, key, value, attn_mask, *more, **by)[0]


def _under_numbers(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None
) -> Tensor:
    # What is hidden is seen in the mask, which is smaller than what it is added to.
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * factor) @ (key * factor).transpose(-2, -1) + attn_mask
    hidden = attn_mask.amax(-1, keepdim=True) == -math.inf
    return (scores.softmax(-1) @ value).masked_fill(hidden, 0.0)
