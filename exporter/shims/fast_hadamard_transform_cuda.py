"""Stands in for `fast_hadamard_transform_cuda`, the extension of fast-hadamard-transform."""

from torch import Tensor

from fuseport.exporter.shims import _hadamard

__all__ = [
    "fast_hadamard_transform",
    "fast_hadamard_transform_12N",
    "fast_hadamard_transform_20N",
    "fast_hadamard_transform_28N",
    "fast_hadamard_transform_40N",
]


def fast_hadamard_transform(x: Tensor, scale: float) -> Tensor:
    """Rows of (…, n), filled up to a power of 2, times Sylvester's matrix and `scale`."""
    return _hadamard.transform(x, scale)


def fast_hadamard_transform_12N(x: Tensor, scale: float) -> Tensor:  # noqa: N802
    """The same with 12 times a power of 2, as those below with 20, 28 and 40."""
    return _hadamard.transform(x, scale, 12)


def fast_hadamard_transform_20N(x: Tensor, scale: float) -> Tensor:  # noqa: N802
    """With 20 times a power of 2; this matrix is not symmetric."""
    return _hadamard.transform(x, scale, 20)


def fast_hadamard_transform_28N(x: Tensor, scale: float) -> Tensor:  # noqa: N802
    """With 28 times a power of 2; this matrix is not symmetric."""
    return _hadamard.transform(x, scale, 28)


def fast_hadamard_transform_40N(x: Tensor, scale: float) -> Tensor:  # noqa: N802
    """With 40 times a power of 2; this matrix is not symmetric."""
    return _hadamard.transform(x, scale, 40)
