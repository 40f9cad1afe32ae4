"""Stands in for `resample2d_cuda`, FlowNet2's warp of an image by a flow."""

import torch
from torch import Tensor

from fuseport.exporter.shims import _correlation
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["backward", "forward"]


def forward(
    input1: Tensor, input2: Tensor, output: Tensor, kernel_size: int, bilinear: bool = True
) -> int:
    """Writes the image (b, c, h, w) at places displaced by the flow (b, 2, h, w), x first.

    Between pixels it is bilinear, or that of the nearest pixel; outside, that of the border.

    Raises:
        NotImplementedError: `kernel_size` is not 1; the extension sums over windows that reach
            over the border then.
        ValueError: the flow has another height or width.
    """
    output.copy_(_warped(input1, input2, kernel_size, bilinear))
    return 1


def backward(
    input1: Tensor,
    input2: Tensor,
    gradOutput: Tensor,  # the extension's names
    gradInput1: Tensor,
    gradInput2: Tensor,
    kernel_size: int,
    bilinear: bool = True,
) -> int:
    """Writes the gradients of image and flow.

    Those of what `forward` computes: the extension's of an image is another, and wrong, where the
    flow points above or to the left of it, and knows no nearest pixels.
    """

    def of_both(image: Tensor, flow: Tensor) -> Tensor:
        # Nearest pixels have no gradient by the flow; zero, not None.
        return _warped(image, flow, kernel_size, bilinear) + 0 * flow[:, :1]

    found = differentiated(of_both, [input1, input2], gradOutput)
    _correlation.write([gradInput1, gradInput2], found)
    return 1


def _warped(image: Tensor, flow: Tensor, kernel_size: int, bilinear: bool) -> Tensor:
    if kernel_size != 1:
        raise NotImplementedError(
            f"kernel_size {kernel_size}: fuseport's stand-in for resample2d_cuda has 1 only"
        )
    height, width = image.shape[2:]
    if flow.shape[2:] != image.shape[2:]:
        raise ValueError(f"a flow of {tuple(flow.shape)} for images of {tuple(image.shape)}")
    rows, columns = (
        torch.arange(size, device=flow.device, dtype=flow.dtype) for size in (height, width)
    )
    x, y = columns + flow[:, 0], rows[:, None] + flow[:, 1]
    pixels = image.flatten(2)

    def at(row: Tensor, column: Tensor) -> Tensor:
        # Clamped before they are integers: a flow may be larger than these.
        place = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
        index = place.flatten(1).unsqueeze(1).expand(-1, pixels.shape[1], -1)
        return pixels.gather(2, index).reshape(image.shape)

    if not bilinear:
        return at((y + 0.5).floor(), (x + 0.5).floor())
    left, top = x.floor(), y.floor()
    right, bottom = (x - left).unsqueeze(1), (y - top).unsqueeze(1)
    upper = (1 - right) * at(top, left) + right * at(top, left + 1)
    lower = (1 - right) * at(top + 1, left) + right * at(top + 1, left + 1)
    return (1 - bottom) * upper + bottom * lower
