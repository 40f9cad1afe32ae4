"""Batch norms over several processes, of which there is one here: torch's."""

from typing import Any

from torch import Tensor, nn

from ._refused import ForTraining

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]


class DistributedDataParallel(ForTraining):
    """Refuses."""


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's, with the package's arguments.

    Args:
        num_features: channels.
        eps: under the root.
        momentum: of the running statistics.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics.
        process_group: has no effect.
        channel_last: whether channels are the last dimension, not the second.
        fuse_relu: whether ReLU follows.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """The norm of (b, channels, …), plus z if it is given."""
        out = input.movedim(-1, 1) if self.channel_last else input
        out = super().forward(out)
        out = out.movedim(1, -1) if self.channel_last else out
        out = out if z is None else out + z
        return out.relu() if self.fuse_relu else out


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """`module`, its batch norms replaced by `SyncBatchNorm` with their weights and statistics."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(
        module, nn.modules.instancenorm._InstanceNorm
    ):
        norm = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            channel_last=channel_last,
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(norm, name, getattr(module, name))
        return norm.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, convert_syncbn_model(child, process_group, channel_last))
    return module
