"""Autograd functions that launch kernels of CuPy: computed by torch, where their kernels are known.

A launch passes addresses, so that nothing of it could be traced. Of a file that imports CuPy's
stand-in, an autograd function whose forward names a known kernel gets another `apply`, which
computes the same in torch. That it is the same is not taken from the name: before the first call,
the function itself runs on a few small arrays, its forward and its backward, with the texts of its
kernels interpreted (`text`), and results and gradients have to agree.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from fuseport.exporter.shims._cuda import is_there, replaced
from fuseport.exporter.shims._cupy import RawKernel, launched
from fuseport.exporter.shims._raw_kernels.known import KNOWN, Form, Known
from fuseport.exporter.shims._raw_kernels.parser import NotUnderstood
from fuseport.exporter.shims._raw_kernels.text import Pointer, launch

__all__ = ["computed"]


@contextmanager
def computed(beside: list[Any]) -> Iterator[None]:
    """For the time of the context, autograd functions that are defined get another `apply` where
    their forward names a known kernel, and their file CuPy, or a function of a file that does.

    Where there is no GPU, what code says of one that launches kernels is answered.

    Args:
        beside: they join these, which have tensors on CUDA to code that names them.
    """

    def init_subclass(cls: Any, /, **options: Any) -> None:
        super(Function, cls).__init_subclass__(**options)
        forward = inspect.unwrap(cls.forward)
        names = sorted(set(_mentioned(forward.__code__))) if inspect.isfunction(forward) else []
        found = [(known, name) for known in KNOWN for name in names if known.name.fullmatch(name)]
        if found and _has_kernels(forward.__globals__):
            cls.apply = staticmethod(_Apply(cls, *found[0]))
            beside.append(cls)
        elif isinstance(cls.apply, _Apply):  # of a base, whose forward is another one
            cls.apply = classmethod(_apply)

    def asked(real: Any, answer: Any) -> Any:
        return lambda *device: answer if beside and not is_there() else real(*device)

    answers = {
        name: asked(getattr(torch.cuda, name), answer)
        for name, answer in (("current_stream", _STREAM), ("get_device_name", "none"))
    }
    hook = {"__init_subclass__": classmethod(init_subclass)}
    with replaced(Function, **hook), replaced(torch.cuda, **answers):
        yield


# What code hands on to a launch.
_STREAM = SimpleNamespace(cuda_stream=0, ptr=0)


def _has_kernels(names: Mapping[str, Any]) -> bool:
    """Whether CuPy's stand-in is among the names of a file, or a function of a file with it."""
    for value in [*names.values()]:
        others = value.__globals__.values() if inspect.isfunction(value) else ()
        if any(_is_cupy(found) for found in (value, *others)):
            return True
    return False


def _is_cupy(value: Any) -> bool:
    return isinstance(value, ModuleType) and vars(value).get("RawKernel") is RawKernel


def _mentioned(code: CodeType) -> Iterator[str]:
    """The names that code has, and its constants that could be such."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _mentioned(constant)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return Function.__dict__["apply"].__get__(None, cls)(*args, **kwargs)


class _Apply:
    """The `apply` of an autograd function, in torch.

    Args:
        cls: the function.
        known: what its kernel is expected to compute.
        kernel: its name.
    """

    def __init__(self, cls: Any, known: Known, kernel: str) -> None:
        self._cls, self._known, self._kernel = cls, known, kernel
        self._forms: dict[tuple[Any, ...], Form] = {}

    def __call__(self, *args: Any) -> Tensor:
        tried = tuple(_as_tried(a) for a in args)
        if tried not in self._forms:
            self._forms[tried] = self._agreed(tried)
        return self._forms[tried](*args)

    def _agreed(self, args: Sequence[Any]) -> Form:
        """What computes the same as the function.

        Args:
            args: the arguments, `_Like` in place of tensors.

        Raises:
            NotImplementedError: nothing that is known does.
        """
        with _small(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of CUDA that is not there
            try:
                for shapes in self._known.shapes(*(a.dim if _is_like(a) else a for a in args)):
                    form, reason = self._tried(args, shapes)
                    if reason:
                        break
            except NotUnderstood as error:
                reason = f"{error}"
            except Exception as error:  # of their code, and whatever its texts do
                reason = f"{type(error).__name__} {error}".rstrip()
        if reason:
            self._refuse(reason)
        return form

    def _tried(self, args: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Form, str]:
        """What should compute the same, and why it does not; nothing where it does."""
        draw = torch.Generator().manual_seed(0)
        sizes = iter(shapes)
        given = [
            torch.randn(next(sizes), generator=draw).to(a.dtype) if _is_like(a) else a for a in args
        ]
        out, backward = _theirs(self._cls, given)
        form = self._known.form(out.shape[1])
        cotangent = torch.randn(out.shape, generator=draw).to(out.dtype)
        return form, _difference(form, given, out, cotangent, backward(cotangent))

    def _refuse(self, reason: str) -> None:
        code = inspect.unwrap(self._cls.forward).__code__
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        raise NotImplementedError(
            f"{self._cls.__name__} ({place}) launches the CUDA kernel {self._kernel}, which by its "
            f"name is {self._known.what}; interpreted on small arrays it is not what fuseport "
            f"computes by that name: {reason}. CUDA kernels run on GPUs only, and no exported "
            "format holds one: compute it by functions of torch, or make it an op of your own "
            "(README, Ops of your own)"
        )


@dataclass(frozen=True)
class _Like:
    """What stands for a tensor."""

    dtype: torch.dtype
    dim: int


def _as_tried(arg: Any) -> Any:
    """What an argument is tried as. Where truth is in float64, kernels would have float32."""
    if isinstance(arg, Tensor):
        return _Like(torch.float32 if arg.dtype == torch.float64 else arg.dtype, arg.dim())
    if isinstance(arg, list):
        return tuple(map(_as_tried, arg))
    return int(arg) if isinstance(arg, torch.SymInt) else arg


def _is_like(arg: Any) -> bool:
    return isinstance(arg, _Like)


class _Context:
    """What a forward and its backward get as `ctx`."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) for a in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _theirs(cls: Any, args: Sequence[Any]) -> tuple[Tensor, Callable[[Tensor], Sequence[Any]]]:
    """What the function gives, its kernels interpreted; and its backward, likewise."""
    context: Any = _Context(args)
    with _interpreted(), torch.no_grad():
        out = cls.forward(context, *args)

    def backward(cotangent: Tensor) -> Sequence[Any]:
        if cls.backward is Function.backward:  # of a model that is run only
            return ()
        with _interpreted(), torch.no_grad():
            found = cls.backward(context, cotangent)
        return found if isinstance(found, tuple) else (found,)

    return out, backward


def _difference(
    form: Form, args: Sequence[Any], out: Tensor, cotangent: Tensor, gradients: Sequence[Any]
) -> str:
    """Where a form gives something else than was found; nothing where it does not."""
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args]
    with torch.enable_grad():
        ours = form(*leaves)
        if (ours.dtype, ours.shape) != (out.dtype, out.shape):
            return f"it gives {_said(out)}, and not {_said(ours)}"
        wanted = [a for a in leaves if isinstance(a, Tensor)]
        slopes = iter(torch.autograd.grad(ours, wanted, cotangent, materialize_grads=True))
    if not _close(ours, out):
        return f"its results differ by up to {(ours - out).abs().max():.2g}"
    if any(theirs is not None for theirs in gradients[len(leaves) :]):
        return f"its backward gives {len(gradients)} gradients"
    for place, (arg, theirs) in enumerate(zip(leaves, gradients, strict=False)):
        if isinstance(arg, Tensor) and (theirs is None or not _close(next(slopes), theirs)):
            return f"its backward gives another gradient of argument {place}"
    return ""


def _close(ours: Tensor, theirs: Tensor) -> bool:
    within = max(1e-4, *(2 * torch.finfo(x.dtype).eps for x in (ours, theirs)))
    return torch.allclose(ours.double(), theirs.double(), rtol=within, atol=within)


def _said(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


@contextmanager
def _small() -> Iterator[None]:
    """Tensors are tensors, also in the middle of a capture."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _interpreted() -> Iterator[None]:
    """Kernels that are launched are interpreted, on tensors whose address was asked for.

    All of them are on CUDA then, as code asks that launches kernels.
    """
    tensors: dict[int, Tensor] = {}
    ask = Tensor.data_ptr

    def address(tensor: Tensor) -> int:
        found = ask(tensor)
        tensors[found] = tensor
        return found

    def run(
        text: str, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], n: int
    ) -> None:
        arrays = {at: _Array(tensors[at]) for at in args if type(at) is int and at in tensors}
        launch(text, name, grid, block, [arrays[a].at if a in arrays else a for a in args], n)
        for array in arrays.values():
            array.store()

    kinds = {
        f"{name}Tensor": _Kind(f"{name}Tensor", (), {"dtype": dtype})
        for name, dtype in (("Half", torch.float16), ("Float", torch.float32))
    }
    with (
        replaced(Tensor, data_ptr=address, is_cuda=property(lambda tensor: True)),
        replaced(
            torch.cuda,
            current_stream=lambda *device: _STREAM,
            get_device_name=lambda *device: "none",
            **kinds,
        ),
        launched(run),
    ):
        yield


class _Kind(type):
    """Of `torch.cuda.FloatTensor` and its kin, which code takes for dtypes on CUDA."""

    dtype: torch.dtype

    def __instancecheck__(cls, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.dtype == cls.dtype


class _Array:
    """The memory behind a tensor's first element, as a kernel sees it."""

    def __init__(self, tensor: Tensor) -> None:
        begin = tensor.storage_offset()
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - begin
        self._memory = tensor.detach().as_strided((size,), (1,), begin)
        self._values = self._memory.tolist()
        self.at = Pointer(self._values, kind=_KINDS.get(tensor.dtype, ""))

    def store(self) -> None:
        self._memory.copy_(torch.tensor(self._values, dtype=torch.float64))


_KINDS: Mapping[torch.dtype, str] = {
    torch.float16: "half",
    torch.float32: "float",
    torch.float64: "double",
}
