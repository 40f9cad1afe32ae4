"""Layers over sparse tensors."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims.torch_scatter import scatter_sum

from ...tensor import SparseTensor
from ...utils.utils import make_ntuple
from .. import functional as F
from ..functional.pooling import batches
from ..utils import fapply

__all__ = [
    "BatchNorm",
    "Conv3d",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LeakyReLU",
    "ReLU",
    "SiLU",
    "SparseCrop",
]


class Conv3d(nn.Module):
    """Its `kernel` is (places, in, out), or (in, out) of one place without a stride.

    Args:
        kernel_size, stride, padding: a number, or three. Odd sizes without a stride are centred,
            whatever the padding.
        dilation: 1; there it has no effect but on what is kept for others.
        transposed: it goes back to the voxels that a layer of the same window was given.
        generative: False.
        config: which kernel there.

    Raises:
        NotImplementedError: of a dilation, of a generative layer, or of a config with another way
            to voxels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = make_ntuple(kernel_size, ndim=3)
        self.stride = make_ntuple(stride, ndim=3)
        self.dilation = dilation
        given = zip(self.kernel_size, self.stride, make_ntuple(padding, ndim=3), strict=True)
        self.padding = tuple(
            (size - 1) // 2 if size % 2 and step == 1 else pad for size, step, pad in given
        )
        self.transposed = transposed
        self.generative = generative
        self._config = config
        F.refuse_unknown(dilation, generative, config)
        self.kernel_volume = math.prod(self.kernel_size)
        is_product = self.kernel_volume == 1 and self.stride == (1, 1, 1)
        places = () if is_product else (self.kernel_volume,)
        self.kernel = nn.Parameter(torch.zeros(*places, in_channels, out_channels))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, by how many values an output is of."""
        channels = self.out_channels if self.transposed else self.in_channels
        bound = 1 / math.sqrt(channels * self.kernel_volume)
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """Its arguments."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, bias={self.bias is not None}, transposed={self.transposed}"
        )

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See `functional.conv3d`."""
        return F.conv3d(
            input,
            self.kernel,
            self.kernel_size,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self._config,
            self.transposed,
            self.generative,
        )


class _OfFeatures:
    """Mixed in before a module of torch."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        """Of features."""
        return fapply(input, super().forward)  # type: ignore[misc]


class BatchNorm(_OfFeatures, nn.BatchNorm1d):  # type: ignore[misc]
    """Of features."""


class InstanceNorm(_OfFeatures, nn.InstanceNorm1d):  # type: ignore[misc]
    """As there: of features (n, c) as if these were n channels of c values."""


class ReLU(_OfFeatures, nn.ReLU):  # type: ignore[misc]
    """Of features."""


class LeakyReLU(_OfFeatures, nn.LeakyReLU):  # type: ignore[misc]
    """Of features."""


class SiLU(_OfFeatures, nn.SiLU):  # type: ignore[misc]
    """Of features."""


class GroupNorm(nn.GroupNorm):
    """Over the voxels of each batch."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """Of a sparse tensor."""
        batch, count = batches(input)
        x = input.feats.unflatten(1, (self.num_groups, -1))
        ones = torch.ones_like(x[:, :1, 0])
        values = scatter_sum(ones, batch, 0, dim_size=count) * x.shape[2]
        centred = x - (scatter_sum(x.sum(2), batch, 0, dim_size=count) / values)[batch, :, None]
        variance = scatter_sum(centred.square().sum(2), batch, 0, dim_size=count) / values
        feats = (centred * (variance + self.eps).rsqrt()[batch, :, None]).flatten(1)
        if self.affine:
            feats = feats * self.weight + self.bias
        return input.with_features(feats)


class GlobalAvgPool(nn.Module):
    """The mean of each batch."""

    def forward(self, input: SparseTensor) -> Tensor:
        """(batch, c)."""
        return F.global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """The largest value of each channel."""

    def forward(self, input: SparseTensor) -> Tensor:
        """(batch, c)."""
        return F.global_max_pool(input)


class SparseCrop(nn.Module):
    """The voxels of a box."""

    def __init__(self, coords_min: Any = None, coords_max: Any = None) -> None:
        super().__init__()
        self.coords_min = coords_min
        self.coords_max = coords_max

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See `functional.spcrop`."""
        return F.spcrop(input, self.coords_min, self.coords_max)
