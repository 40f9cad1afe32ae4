"""The dtypes that kernels compute in and take beside each other."""

import torch
from torch import Tensor

__all__ = ["beside", "wide"]


def beside(t: Tensor, x: Tensor) -> Tensor:
    """t in a dtype that the ops take beside x: x's, or float32 beside a half type."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return t if half and t.dtype == torch.float32 else t.to(x.dtype)


def wide(*tensors: Tensor) -> torch.dtype:
    """That which all of them fit in, float32 at least."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype
