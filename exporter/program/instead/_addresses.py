"""Addresses of tensors in a capture, which has none: they can be asked how they are aligned."""

from typing import NoReturn

from torch import Tensor

__all__ = ["ALIGNED", "Address"]

ALIGNED = 64
"""The bytes that torch aligns a tensor by, on any device: `c10::gAlignment`."""


class Address:
    """What `data_ptr()` gives: `x if x.data_ptr() % 16 == 0 else x.clone()` is x.

    It is no number, lest what follows addresses follows one that is none; all else that is asked of
    it fails as torch's own does.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __mod__(self, by: int) -> int:
        if by > 0 and ALIGNED % by == 0:
            return 0  # what has an offset in its memory has another address in each run
        self._refuse()

    def __and__(self, bits: int) -> int:
        return self % (bits + 1)

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def __hash__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def __index__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._tensor.untyped_storage().data_ptr()
        raise RuntimeError("Cannot access data pointer of a tensor in a capture")
