"""Norms of features, under the names of MinkowskiEngine's checkpoints."""

from typing import Any

import torch
from torch import nn

from ._broadcast import at_voxels
from .MinkowskiCommon import MinkowskiModuleBase, PoolingMode
from .MinkowskiPooling import over_batches
from .MinkowskiSparseTensor import SparseTensor

__all__ = ["MinkowskiBatchNorm", "MinkowskiInstanceNorm", "MinkowskiSyncBatchNorm"]

_EPS = 1e-8


class MinkowskiBatchNorm(nn.Module):
    """`torch.nn.BatchNorm1d`, as `bn`."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        self.bn: nn.Module = nn.BatchNorm1d(
            num_features, eps, momentum, affine, track_running_stats
        )

    def forward(self, input: Any) -> Any:
        """Of a sparse tensor, or a field."""
        return input.with_features(self.bn(input.F))


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """The same over several GPUs."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        self.bn = nn.SyncBatchNorm(
            num_features, eps, momentum, affine, track_running_stats, process_group
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """The module, with these in place of `MinkowskiBatchNorm`, and their parameters."""
        found = module
        if isinstance(module, MinkowskiBatchNorm):
            own: Any = module.bn
            found = cls(
                own.num_features,
                own.eps,
                own.momentum,
                own.affine,
                own.track_running_stats,
                process_group,
            )
            for name, parameter in own.named_parameters():
                setattr(found.bn, name, parameter)
            for name, buffer in own.named_buffers():
                setattr(found.bn, name, buffer)
        for name, child in module.named_children():
            if name != "bn" or found is module:
                found.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return found


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """Over the voxels of each batch; its `weight` and `bias` are (1, c)."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.ones(1, num_features))
        self.bias = nn.Parameter(torch.zeros(1, num_features))

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        """(x - mean) / √(variance + 1e-8) · weight + bias."""
        assert isinstance(input, SparseTensor)
        mode = PoolingMode.GLOBAL_AVG_POOLING_KERNEL
        manager = input.coordinate_manager
        glob = SparseTensor(
            over_batches(input, input.F, mode),
            coordinate_map_key=manager.origin(),
            coordinate_manager=manager,
        )
        centred = input.F - at_voxels(input, glob)
        variance = glob.with_features(over_batches(input, centred.square(), mode))
        scale = variance.with_features((variance.F + _EPS).rsqrt())
        return input.with_features(
            centred * at_voxels(input, scale) * self.weight.flatten() + self.bias.flatten()
        )

    def extra_repr(self) -> str:
        """Its channels."""
        return f"nchannels={self.num_features}"
