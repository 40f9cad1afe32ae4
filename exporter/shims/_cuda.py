"""What model code says of CUDA, and torch refuses on the CPU.

A guard with nothing to guard: code around Triton kernels says `with torch.cuda.device(x.device):`,
or `x.device.index`, also where x may be on the CPU. And moves: research code says
`torch.empty(n).cuda()`, `device="cuda"`, `.to("cuda")` in the middle of a forward, and
`torch.cuda.FloatTensor(n)` for a tensor to write to. And a question: code that calls an extension
for CUDA raises unless `x.is_cuda`, which its stand-in does not want.
"""

import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from types import FrameType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds to load
    from torch.overrides import TorchFunctionMode

__all__ = ["MOVES", "is_there", "none_moves", "of_cpu_allowed", "replaced", "said_beside"]

MOVES = "torch.cuda"
"""The name of a stand-in for the device: what is moved there stays."""

_CONSTRUCTORS = {
    "BoolTensor": "bool",
    "ByteTensor": "uint8",
    "DoubleTensor": "float64",
    "FloatTensor": "float32",
    "HalfTensor": "float16",
    "IntTensor": "int32",
    "LongTensor": "int64",
}
"""In `torch.cuda`, with the dtypes of what they make."""


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "current_device": lambda: 0,
    "get_device_name": lambda *device: "none",
    "get_device_capability": lambda *device: (8, 0),
    "get_device_properties": lambda *device: SimpleNamespace(
        name="none", major=8, minor=0, multi_processor_count=1, warp_size=32, total_memory=2**36
    ),
}
"""What code asks that launches kernels: by how many processors it divides its work, for one."""


def is_there() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


@contextmanager
def of_cpu_allowed() -> Iterator[None]:
    """For the time of the context, guards of the CPU do nothing; others do what torch's do."""
    import torch

    real = torch.cuda
    with replaced(real, device=_guard(real.device), _DeviceGuard=_guard(real._DeviceGuard)):
        yield


@contextmanager
def answered() -> Iterator[None]:
    """For the time of the context, what code asks of a GPU that torch does not see is answered."""
    import torch

    with replaced(torch.cuda, **({} if is_there() else _ANSWERS)):
        yield


def _guard(real: Any) -> type:
    """A guard of a device, which of the CPU does nothing."""

    class device(real):  # type: ignore[misc]  # noqa: N801  # torch's name
        def __init__(self, device: Any) -> None:
            self._guards = not _is_cpu(device)
            if self._guards:
                super().__init__(device)

        def __enter__(self) -> None:
            if self._guards:
                super().__enter__()

        def __exit__(self, *raised: Any) -> Any:
            return super().__exit__(*raised) if self._guards else False

    return device


@contextmanager
def said_beside(stand_ins: Collection[Any]) -> Iterator[None]:
    """For the time of the context, all tensors are on CUDA to code of a file that has one of these
    modules among its names, or a class, be it that of a module that it names; more of them may come
    meanwhile."""
    import torch

    before = torch.Tensor.is_cuda

    def is_cuda(tensor: torch.Tensor) -> bool:
        on_cuda: bool = before.__get__(tensor)  # type: ignore[attr-defined]  # a descriptor
        frame = sys._getframe(1)
        return on_cuda or _names_one(frame, stand_ins) or _insists(frame)

    with replaced(torch.Tensor, is_cuda=property(is_cuda)):
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """For the time of the context, other attributes."""
    before = {name: value for name, value in vars(owner).items() if name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


def _names_one(frame: FrameType, stand_ins: Collection[Any]) -> bool:
    named = [*frame.f_globals.values()]
    if any(value is one for value in named for one in stand_ins):
        return True
    classes = {id(one) for one in stand_ins if isinstance(one, type)}
    modules = [vars(value) for value in named if classes and isinstance(value, ModuleType)]
    return any(id(value) in classes for names in modules for value in [*names.values()])


def _insists(frame: FrameType) -> bool:
    """Whether code with kernels in Triton asserts it, or raises otherwise.

    Code that goes another way on the CPU is left to go it.
    """
    file, line = frame.f_code.co_filename, frame.f_lineno
    here, after = (linecache.getline(file, n, frame.f_globals).strip() for n in (line, line + 1))
    raises = here.startswith(("if not ", "if (not ")) and after.startswith("raise ")
    return (here.startswith("assert ") or raises) and _names_triton(frame)


def _names_triton(frame: FrameType) -> bool:
    named = [*frame.f_globals.values()]
    modules = (value.__name__ for value in named if isinstance(value, ModuleType))
    return any(name.partition(".")[0] == "triton" for name in modules) or any(
        hasattr(type(value), "__getitem__") and hasattr(value, "arg_names") for value in named
    )


class _Constructor(type):
    """Of `torch.cuda.FloatTensor` and its kin, which are called, and asked for by `isinstance`."""

    make: Any
    real: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)


def none_moves(used: list[str]) -> "TorchFunctionMode":
    """A context in which what is moved to CUDA stays where it is, and what is made there is on the
    CPU; `used` has `MOVES` in it from the first time on."""
    mode: TorchFunctionMode = _mode()(used)
    return mode


@cache
def _mode() -> Any:
    """The class: made once, since one of it is there for each call of model code."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Stays(TorchFunctionMode):
        def __init__(self, used: list[str]) -> None:
            super().__init__()
            self._used = used
            self._replaced = ExitStack()

        def __enter__(self) -> Any:
            made = {
                name: _Constructor(
                    name,
                    (),
                    {"make": partial(self._tensor, name), "real": getattr(torch.cuda, name)},
                )
                for name in _CONSTRUCTORS
            }
            self._replaced.enter_context(replaced(torch.cuda, **made))
            scan = _scanning(torch._higher_order_ops.associative_scan)
            for owner in (torch._higher_order_ops, sys.modules[scan.__module__]):
                self._replaced.enter_context(replaced(owner, associative_scan=scan))
            return super().__enter__()  # type: ignore[no-untyped-call]

        def __exit__(self, *raised: Any) -> None:
            self._replaced.close()
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

        def _tensor(self, name: str, *given: Any, device: Any = None) -> Any:
            """`torch.cuda.FloatTensor`: of sizes, without values; or of values."""
            dtype = getattr(torch, _CONSTRUCTORS[name])
            if len(given) == 1 and not isinstance(given[0], (int, torch.SymInt, torch.Size)):
                return torch.as_tensor(given[0], dtype=dtype, device=self._stays())
            return torch.empty(*given, dtype=dtype, device=self._stays())

        def _stays(self) -> str:
            if MOVES not in self._used:
                self._used.append(MOVES)
            return "cpu"

        def __torch_function__(
            self,
            function: Any,
            types: Any,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            given = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                self._stays()
                return args[0]
            if function is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
                args = (args[0], self._stays(), *args[2:])
            if _is_cuda(given.get("device")):
                given["device"] = self._stays()
            return function(*args, **given)

    return Stays


def _scanning(own: Any) -> Any:
    """Torch's `associative_scan`, which as a rule refuses tensors on the CPU."""
    from torch.utils import _pytree as pytree

    from fuseport.exporter.shims import used_again

    @wraps(own)
    def associative_scan(
        combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        if combine_mode == "pointwise" and all(x.is_cpu for x in pytree.tree_leaves(xs)):
            combine_mode = "generic"
            used_again(MOVES)
        return own(combine_fn, xs, dim, reverse, combine_mode)

    return associative_scan


def _is_cuda(device: Any) -> bool:
    import torch

    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)  # its number


def _is_cpu(device: Any) -> bool:
    import torch

    if isinstance(device, int):
        return device < 0  # what `Tensor.get_device` says of the CPU
    if device is None:  # what a device on the CPU says of its index; else it is the current one
        return not is_there()
    return torch.device(device).type == "cpu"
