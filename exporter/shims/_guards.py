"""`torch.cuda.device` of a tensor on the CPU: a guard with nothing to guard.

Code around Triton kernels says `with torch.cuda.device(x.device):`, or `x.device.index`, also where
x may be on the CPU, and torch raises there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["of_cpu_allowed"]


@contextmanager
def of_cpu_allowed() -> Iterator[None]:
    """For the time of the context, guards of the CPU do nothing; others do what torch's do."""
    import torch

    real = torch.cuda.device

    class device(real):  # type: ignore[misc, valid-type]  # noqa: N801  # torch's name
        def __init__(self, device: Any) -> None:
            self._guards = not _is_cpu(device)
            if self._guards:
                super().__init__(device)

        def __enter__(self) -> None:
            if self._guards:
                super().__enter__()

        def __exit__(self, *raised: Any) -> Any:
            return super().__exit__(*raised) if self._guards else False

    torch.cuda.device = device  # type: ignore[misc]
    try:
        yield
    finally:
        torch.cuda.device = real  # type: ignore[misc]


def _is_cpu(device: Any) -> bool:
    import torch

    if isinstance(device, int):
        return device < 0  # what `Tensor.get_device` says of the CPU
    if device is None:  # what a device on the CPU says of its index; else it is the current one
        return not torch.cuda.is_available()
    return torch.device(device).type == "cpu"
