"""Stands in for `correlation_cuda`, the correlation of FlowNet2 and its heirs."""

from torch import Tensor

from fuseport.exporter.shims import _correlation
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["backward", "forward"]


def forward(
    input1: Tensor,
    input2: Tensor,
    rInput1: Tensor,  # the extension's names
    rInput2: Tensor,
    output: Tensor,
    pad_size: int,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
    corr_type_multiply: int,
) -> int:
    """Gives `output` its size, (b, displacements, h', w'), and writes the correlation there.

    `rInput1` and `rInput2` are the extension's scratch, and `corr_type_multiply` has no effect,
    there as here.

    Raises:
        ValueError, NotImplementedError: see `_correlation.flownet`.
    """
    sizes = (pad_size, kernel_size, max_displacement, stride1, stride2)
    _correlation.write([output], [_correlation.flownet(input1, input2, *sizes)])
    return 1


def backward(
    input1: Tensor,
    input2: Tensor,
    rInput1: Tensor,
    rInput2: Tensor,
    gradOutput: Tensor,
    gradInput1: Tensor,
    gradInput2: Tensor,
    pad_size: int,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
    corr_type_multiply: int,
) -> int:
    """Writes the gradients of both inputs; with `stride1` above 1 the extension's are others, and
    wrong."""

    def of_both(one: Tensor, two: Tensor) -> Tensor:
        return _correlation.flownet(
            one, two, pad_size, kernel_size, max_displacement, stride1, stride2
        )

    found = differentiated(of_both, [input1, input2], gradOutput)
    _correlation.write([gradInput1, gradInput2], found)
    return 1
