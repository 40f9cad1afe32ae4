"""Lengths of sequences, where a model takes them in decreasing order alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.models import Model, with_inputs
from fuseport.exporter.models.model import up_to_a_dimension
from fuseport.exporter.program import TensorSpec

__all__ = ["in_order"]

_ASKED = "must be sorted in decreasing order"  # as `pack_padded_sequence` raises it


def in_order(model: Model, inputs: Mapping[str, Tensor], call: Callable[..., Any]) -> Model:
    """The same model, whose lengths are drawn in decreasing order if it asks for that.

    Args:
        model: of any code.
        inputs: that it may be called with.
        call: calls it; it is called with lengths that increase.
    """
    vectors = [s for s in model.inputs if s.high is not None and len(s.dims) == 1]
    lengths = list(filter(up_to_a_dimension, vectors)) or vectors
    if model.given is not None or not lengths:
        return model
    specs = [replace(s, descending=s in lengths) for s in model.inputs]
    increasing = {s.name: _increasing(s, inputs[s.name]) for s in specs if s.descending}
    try:
        call(*{**inputs, **increasing}.values())
    except Exception as error:  # others than that come again where it is called as it should be
        if _ASKED in str(error):
            return replace(with_inputs(model, specs), sizes=model.sizes)
    return model


def _increasing(spec: TensorSpec, like: Tensor) -> Tensor:
    # Of those up to a dimension, the first one drawn is that.
    largest = spec.high - 1 if isinstance(spec.high, int) else int(like.max())
    return torch.linspace(spec.low, largest, like.shape[0]).to(like.dtype)
