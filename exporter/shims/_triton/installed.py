"""Triton itself, where it is installed: kernels are computed by torch, but for tensors on a GPU."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fuseport.exporter.shims._cuda import replaced
from fuseport.exporter.shims._patching import patching
from fuseport.exporter.shims._triton import host
from fuseport.exporter.shims._triton.kernels import JITFunction
from fuseport.exporter.shims._triton.language import next_power_of_2

__all__ = ["KERNELS", "computed", "watched"]

KERNELS = "triton.runtime.jit"
"""The module of Triton that launches kernels, and the name of a stand-in for that."""

# The names used by those that compute kernels now, the last one last.
_active: list[list[str]] = []


@contextmanager
def computed(used: list[str]) -> Iterator[None]:
    """For the time of the context, kernels of Triton itself are computed by torch.

    Args:
        used: `KERNELS` joins them when one is.
    """
    _active.append(used)
    if KERNELS in sys.modules:
        _patch(sys.modules[KERNELS])
    there = sys.modules.get("triton")
    sizes = nullcontext() if there is None else replaced(there, next_power_of_2=next_power_of_2)
    try:
        with sizes:
            yield
    finally:
        _active.pop()


def watched(spec: ModuleSpec | None) -> ModuleSpec | None:
    """How Triton's module is imported meanwhile, by how it is otherwise."""
    return patching(spec, _patch)


def _patch(module: ModuleType) -> None:
    """Has kernels ask, when they are launched, who computes them now."""
    interface = getattr(module, "KernelInterface", None)
    theirs = getattr(interface, "__getitem__", None)
    if theirs is None or getattr(theirs, "fuseport", False):
        return

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if not _active or _is_on_gpu([*args, *kwargs.values()]):
                return theirs(kernel, grid)(*args, **kwargs)
            if KERNELS not in _active[-1]:
                _active[-1].append(KERNELS)
            return JITFunction.of(kernel)[grid](*args, **kwargs)

        return launch

    launcher.fuseport = True  # type: ignore[attr-defined]
    interface.__getitem__ = launcher  # type: ignore[index]
    _answer(type(getattr(module, "driver", None)))


def _answer(config: type) -> None:
    """Has Triton's driver answer where it finds no GPU, which it says by an error."""
    theirs = vars(config).get("active")
    if theirs is None:
        return

    def active(self: Any) -> Any:
        try:
            return theirs.__get__(self)
        except RuntimeError:
            if not _active:
                raise
            return host.active()

    config.active = property(active)  # type: ignore[attr-defined]


def _is_on_gpu(args: Sequence[Any]) -> bool:
    """Whether Triton can launch a kernel: its tensors are on a GPU, and have values."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    traced = get_proxy_mode() is not None or any(isinstance(t, FakeTensor) for t in tensors)
    return not traced and all(t.device.type != "cpu" for t in tensors)
