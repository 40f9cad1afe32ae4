"""Whether two computations of one thing differ by rounding alone, as far as that can be told."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["close", "same", "usual"]


def close(found: Tensor, wanted: Tensor, largest: float) -> bool:
    """Whether two are the same but for rounding, also where sums of larger values cancel.

    What is no number, or infinite, is so in both.

    Args:
        found: by the one.
        wanted: by the other.
        largest: value that there is in what was computed together with them.
    """
    eps, own = _eps(found), _largest(wanted)
    return _within(found, wanted, eps**0.5 * own + 256 * eps * largest)


def usual(found: Tensor, wanted: Tensor) -> bool:
    """Whether two are as close as they are as a rule where nothing but rounding differs."""
    return _within(found, wanted, 64 * _eps(found) * _largest(wanted))


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0


def _largest(x: Tensor) -> float:
    finite = x.detach()[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _within(found: Tensor, wanted: Tensor, error: float) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not found.is_floating_point() or not found.numel():
        return torch.equal(found, wanted)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return bool((same | ((found - wanted).abs() <= error)).all())


def same(result: Tensor | Mapping[str, Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether what a program returns is what its model does, but for rounding."""
    found = [result] if isinstance(result, Tensor) else list(result.values())
    return len(found) == len(expected) and all(
        close(ours, theirs, 0.0) for ours, theirs in zip(found, expected, strict=True)
    )
