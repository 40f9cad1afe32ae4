"""Model code in float64, whatever narrower dtypes it names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["Float64", "widened"]


class Float64(TorchFunctionMode):
    """All floating arithmetic in float64: what model code casts to, or makes in, narrower types.

    Casts become casts to float64, factories make float64, and tensors of narrower types that the
    code holds outside of its module are widened where they are used.

    Args:
        told: what code hears that asks for the dtype of a float64 tensor, for model code that
            insists on it.
    """

    def __init__(self, *, told: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._told = told

    def __enter__(self) -> "Float64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._told != torch.float64 and getattr(func, "__self__", None) is _DTYPE:
            found = func(*args)
            return self._told if found == torch.float64 else found
        if func in _CASTS:
            return args[0].to(_CASTS[func])
        args, kwargs = pytree.tree_map(_raised, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def widened(module: nn.Module) -> nn.Module:
    """The module, its parameters and buffers in float64; complex ones in complex128."""
    module._apply(_raised)
    return module


def _raised(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, str):
        return _LEGACY.get(value, value)
    if isinstance(value, type) and value.__module__ == "torch":
        return _LEGACY.get(f"torch.{value.__name__}", value)
    return value


_DTYPE = Tensor.__dict__.get("dtype", Tensor.dtype)
_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = {
    Tensor.float: torch.float64,
    Tensor.half: torch.float64,
    Tensor.bfloat16: torch.float64,
    Tensor.cfloat: torch.complex128,  # type: ignore[attr-defined]  # missing in torch's stubs
}
# What `tensor.type` takes beside a dtype.
_LEGACY = dict.fromkeys(
    ["torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"], "torch.DoubleTensor"
)
