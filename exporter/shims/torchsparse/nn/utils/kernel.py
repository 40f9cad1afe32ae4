"""Where a window's places are."""

import itertools
from typing import Any

import torch
from torch import Tensor

from ...utils.utils import make_ntuple

__all__ = ["get_kernel_offsets"]


def get_kernel_offsets(
    size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu"
) -> Tensor:
    """(K, 3), int32: along the first axis first if K is odd, along the last if it is even."""
    sizes, strides, spreads = (make_ntuple(x, ndim=3) for x in (size, stride, dilation))
    steps = [
        [place * step * spread for place in range(-k // 2 + 1, k // 2 + 1)]
        for k, step, spread in zip(sizes, strides, spreads, strict=True)
    ]
    if sizes[0] * sizes[1] * sizes[2] % 2:
        places = [place[::-1] for place in itertools.product(*steps[::-1])]
    else:
        places = list(itertools.product(*steps))
    return torch.tensor(places, dtype=torch.int32, device=device)
