"""Integers of few bits: as indices of 32, which ONNX's GatherND and ScatterND do not take, shifted
as bytes, of which torch.onnx makes nodes of mixed types, and those that differ."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.formats._onnx import scatter

__all__ = ["OF_FEW_BITS"]

aten = torch.ops.aten

Indices = Sequence[Tensor | None]


def _index(x: Tensor, indices: Indices) -> Any:
    wide = _wide(indices)
    return NotImplemented if wide is None else aten.index.Tensor(x, wide)


def _index_put(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Any:
    wide = _wide(indices)
    added = scatter.index_put(x, wide or indices, values, accumulate)
    if added is NotImplemented and wide is not None:
        return aten.index_put.default(x, wide, values, accumulate)
    return added


def _wide(indices: Indices) -> list[Tensor | None] | None:
    """The indices, those of 32 bits in 64; None where there is none."""
    if not any(index is not None and index.dtype == torch.int32 for index in indices):
        return None
    return [i.long() if i is not None and i.dtype == torch.int32 else i for i in indices]


def _shifted(shift: Callable[..., Tensor], x: Any, by: Any) -> Any:
    if any(isinstance(value, Tensor) and value.dtype != torch.uint8 for value in (x, by)):
        return NotImplemented
    x, by = (value.int() if isinstance(value, Tensor) else value for value in (x, by))
    return shift(x, by) & 255  # to be cast to a byte, of which ONNX says nothing for more


def _different(unique: Callable[..., Any], x: Tensor, *arguments: Any, **by: Any) -> Any:
    # ONNX Runtime has Unique of whole numbers in 64 bits and in 8.
    if x.dtype not in (torch.int32, torch.int16):
        return NotImplemented
    values, *others = unique(x.long(), *arguments, **by)
    return values.to(x.dtype), *others


OF_FEW_BITS: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    **{
        unique: functools.partial(_different, unique)
        for unique in (
            aten._unique2.default,
            aten.unique_dim.default,
            aten.unique_consecutive.default,
        )
    },
    **{
        getattr(packet, overload): functools.partial(_shifted, shift)
        for shift, packets in (
            (torch.bitwise_left_shift, (aten.__lshift__, aten.bitwise_left_shift)),
            (torch.bitwise_right_shift, (aten.__rshift__, aten.bitwise_right_shift)),
        )
        for packet in packets
        for overload in ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor")
        if overload in packet.overloads()
    },
}
