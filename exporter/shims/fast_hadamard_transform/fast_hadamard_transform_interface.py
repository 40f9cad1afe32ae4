"""Rows times a Hadamard matrix, with the gradients of that.

The matrices of `hadamard_transform_20N` and of those below are not symmetric, which the package's
own backward passes take them for.
"""

from torch import Tensor

from fuseport.exporter.shims import _hadamard

__all__ = [
    "HadamardTransform12NFn",
    "HadamardTransform20NFn",
    "HadamardTransform28NFn",
    "HadamardTransform40NFn",
    "HadamardTransformFn",
    "hadamard_transform",
    "hadamard_transform_12N",
    "hadamard_transform_20N",
    "hadamard_transform_28N",
    "hadamard_transform_40N",
    "hadamard_transform_ref",
]


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """Sylvester's matrix times each row, times `scale`.

    Args:
        x: (…, n), of a floating dtype. Rows are filled up with zeros to a power of 2, and n
            elements of the result stay.
        scale: a number.

    Returns:
        Of the shape and dtype of x, computed in float32 at least.
    """
    return _hadamard.transform(x, scale)


def hadamard_transform_12N(x: Tensor, scale: float = 1.0) -> Tensor:  # noqa: N802
    """With 12 times a power of 2, at least 48, as those below with 20, 28 and 40."""
    return _hadamard.transform(x, scale, 12)


def hadamard_transform_20N(x: Tensor, scale: float = 1.0) -> Tensor:  # noqa: N802
    """With 20 times a power of 2, at least 80."""
    return _hadamard.transform(x, scale, 20)


def hadamard_transform_28N(x: Tensor, scale: float = 1.0) -> Tensor:  # noqa: N802
    """With 28 times a power of 2, at least 112."""
    return _hadamard.transform(x, scale, 28)


def hadamard_transform_40N(x: Tensor, scale: float = 1.0) -> Tensor:  # noqa: N802
    """With 40 times a power of 2, at least 160."""
    return _hadamard.transform(x, scale, 40)


hadamard_transform_ref = hadamard_transform


class HadamardTransformFn:
    """Called by `apply`, as the autograd functions of these names are."""

    apply = staticmethod(hadamard_transform)


class HadamardTransform12NFn:
    """Of `hadamard_transform_12N`, as those below of theirs."""

    apply = staticmethod(hadamard_transform_12N)


class HadamardTransform20NFn:
    """Of `hadamard_transform_20N`."""

    apply = staticmethod(hadamard_transform_20N)


class HadamardTransform28NFn:
    """Of `hadamard_transform_28N`."""

    apply = staticmethod(hadamard_transform_28N)


class HadamardTransform40NFn:
    """Of `hadamard_transform_40N`."""

    apply = staticmethod(hadamard_transform_40N)
