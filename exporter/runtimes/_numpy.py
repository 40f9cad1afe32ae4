"""Tensors to and from the arrays that ONNX runtimes take; numpy itself has no bfloat16."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

__all__ = ["to_array", "to_tensor"]

Array = np.ndarray[Any, Any]


def to_array(tensor: Tensor) -> Array:
    """A contiguous array with the tensor's values; bfloat16 as ml_dtypes' type."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return np.asarray(tensor.numpy())


def to_tensor(array: Array) -> Tensor:
    """A tensor of its own with the array's values and shape."""
    array = np.array(array, order="C", copy=True)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
