"""Dtypes, as kernels and the code around them name them."""

from collections.abc import Callable
from typing import Any, Self

import torch

__all__ = ["DType", "as_dtype"]


class DType:
    """A dtype as kernels ask about it.

    Args:
        dtype: torch's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype
        self.name = _NAMES.get(dtype, str(dtype))

    def __eq__(self, other: object) -> bool:
        found = as_dtype(other)
        return found is not None and found.torch == self.torch

    def __hash__(self) -> int:
        return hash(self.torch)

    def __repr__(self) -> str:
        return self.name

    @property
    def element_ty(self) -> Self:
        """Of a pointer, what it points at."""
        return self

    scalar = element_ty

    @property
    def primitive_bitwidth(self) -> int:
        """Its bits."""
        return 1 if self.torch == torch.bool else self.torch.itemsize * 8

    def is_floating(self) -> bool:
        """Whether it is a floating dtype."""
        return self.torch.is_floating_point

    def is_int(self) -> bool:
        """Whether it is an integer, signed or not."""
        return not self.torch.is_floating_point

    def is_int_signed(self) -> bool:
        """Whether it is an integer with a sign."""
        return self.is_int() and self.torch.is_signed

    def is_int_unsigned(self) -> bool:
        """Whether it is an integer without a sign."""
        return self.is_int() and not self.torch.is_signed

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if not name.startswith("is_"):
            raise AttributeError(f"a dtype of Triton has no {name!r} here")
        return lambda: name[3:] in (self.name, _NAMES.get(self.torch))


_SAME = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64",
)  # fmt: skip
_BY_NAME = {
    "int1": torch.bool,
    "float8e4nv": torch.float8_e4m3fn,
    "float8e5": torch.float8_e5m2,
    **{name: getattr(torch, name) for name in _SAME},
}

_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "int1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
_SHORT = {name: dtype for dtype, name in _NAMES.items()}


def as_dtype(value: Any) -> DType | None:
    """A dtype of torch, of Triton or of its stand-in; None of others."""
    if isinstance(value, DType):
        return value
    if isinstance(value, torch.dtype):
        return DType(value)
    name = getattr(value, "_name", None) or getattr(value, "name", None)
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    found = _BY_NAME.get(last) or _SHORT.get(last)
    return None if found is None else DType(found)
