"""What code around kernels asks of Triton, and passes to kernels besides tensors and numbers.

What it asks of a device is answered for one processor, so that work is divided for one program
where the code divides it by processors.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.shapes import size_of, torch_dtype

__all__ = [
    "ANSWERS",
    "Compiled",
    "TensorDescriptor",
    "active",
    "constexpr_function",
    "reinterpret",
]

_SHARED = 163 * 1024

ANSWERS: Mapping[str, Callable[..., Any]] = {
    "active.get_active_torch_device": lambda: torch.device("cpu"),
    "active.get_current_device": lambda: 0,
    "active.get_current_stream": lambda *device: 0,
    "active.get_current_target": lambda: SimpleNamespace(backend="cuda", arch=80, warp_size=32),
    "active.utils.get_device_properties": lambda *device: {
        "max_shared_mem": _SHARED,
        "max_num_regs": 65536,
        "multiprocessor_count": 1,
        "warpSize": 32,
    },
}
"""By the ends of their names, functions of `triton.runtime.driver`."""


def active() -> SimpleNamespace:
    """What Triton's own driver would be on a GPU, of which it asks as much as that."""
    found = SimpleNamespace(utils=SimpleNamespace())
    for name, answer in ANSWERS.items():
        *owners, last = name.split(".")[1:]
        setattr(found.utils if owners else found, last, answer)
    return found


class Compiled:
    """A kernel that code has had compiled to learn what it takes of a device: all of it.

    Args:
        launch: the kernel, of a grid.
        constants: arguments by name that it was compiled for.
    """

    n_regs, n_spills = 255, 0

    def __init__(self, launch: Callable[..., Any], constants: Mapping[str, Any]) -> None:
        self._launch, self._constants = launch, dict(constants)
        warps = self._constants.get("num_warps", 4)
        self.metadata = SimpleNamespace(shared=_SHARED, num_warps=warps)

    def _init_handles(self) -> None:
        """Loads nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid=grid, compiled=self._constants)


@dataclass
class TensorDescriptor:
    """A tensor as a kernel takes it block by block.

    Args:
        base: its elements, from the first on.
        shape, strides: of it, in elements.
        block_shape: of a block.
        padding: what is beside it: "zero".
    """

    base: Tensor
    shape: Sequence[Any]
    strides: Sequence[Any]
    block_shape: Sequence[Any]
    padding: str = "zero"

    @classmethod
    def from_tensor(
        cls, tensor: Tensor, block_shape: Sequence[Any], padding: str = "zero"
    ) -> "TensorDescriptor":
        """All of a tensor."""
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, padding)


def constexpr_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of constants, which kernels call and code around them."""

    @functools.wraps(fn)
    def of_constants(*args: Any, **kwargs: Any) -> Any:
        return fn(*map(size_of, args), **{name: size_of(v) for name, v in kwargs.items()})

    return of_constants


def reinterpret(tensor: Tensor, dtype: Any) -> Tensor:
    """The bits of a tensor as numbers of another dtype."""
    return tensor.view(torch_dtype(dtype))
