"""Stands in for `corr_sampler`, RAFT-Stereo's look-up in volumes of correlations."""

from torch import Tensor

from fuseport.exporter.shims._gradients import differentiated
from fuseport.exporter.shims._lookup import between, taps

__all__ = ["backward", "forward"]


def forward(volume: Tensor, coords: Tensor, radius: int) -> list[Tensor]:
    """A window of each row of the volume, linear between elements and zero outside.

    Args:
        volume: (b, h, w, w').
        coords: the windows' centres in [:, 0], (b, 1 or more, h, w). They have no gradient, as in
            the extension.
        radius: of the windows.

    Returns:
        One tensor, (b, 2·radius + 1, h, w).
    """
    index, inside, right = taps(coords.detach()[:, 0], radius, volume.shape[3])
    found = volume.gather(3, index).masked_fill(~inside, 0)
    return [between(found, right.unsqueeze(-1).to(found.dtype), -1).permute(0, 3, 1, 2)]


def backward(volume: Tensor, coords: Tensor, corr_grad: Tensor, radius: int) -> list[Tensor]:
    """The gradient of the volume, by that of the output."""

    def of_volume(rows: Tensor) -> Tensor:
        return forward(rows, coords, radius)[0]

    return differentiated(of_volume, [volume], corr_grad)
