"""What masks are called, how far queries see by them, and masks of lengths."""

import torch
from torch import Tensor

__all__ = ["MASKS", "is_from_end", "mask_name", "padding_of", "window_of"]

MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


def mask_name(given: str) -> str:
    """One of `MASKS`, which had commas and another order once.

    Raises:
        ValueError: it is none.
    """
    name = given.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    if name not in MASKS:
        raise ValueError(f"attn_mask_type is {given!r}; it is one of {', '.join(MASKS)}")
    return name


def window_of(kind: str, given: tuple[int, int] | None) -> tuple[int, int]:
    """How many keys before a query's place, and after it, it sees by a mask of this kind.

    -1 is for all. Causal masks end at a query's place, whatever is given; for others (-1, 0),
    which is the same, is taken for all.

    Raises:
        ValueError: a number of keys is below 0, and they are not all.
    """
    back, ahead = (-1, -1) if given is None else given
    if "causal" in kind:
        if back < -1 or (back == -1 and ahead not in (-1, 0)):
            raise ValueError(f"window_size is {given} for {kind}; it is (-1, 0), or 0 or above")
        return back, 0
    if (back, ahead) in ((-1, -1), (-1, 0)):
        return -1, -1
    if back < 0 or ahead < 0:
        raise ValueError(f"window_size is {given} for {kind}; it is (-1, -1), or 0 or above")
    return back, ahead


def is_from_end(kind: str, given: bool | None) -> bool:
    """Whether the last of queries and keys are at one place, and not the first.

    Masks that are called causal have one way each; others do as is given, and from the end by
    themselves.
    """
    if "bottom_right" in kind:
        return True
    return "causal" not in kind and given is not False


def padding_of(starts: Tensor, length: int) -> Tensor:
    """(b + 1,), sums of lengths → (b, 1, 1, length), True from the end of each sequence on."""
    step = torch.arange(length, device=starts.device)
    return (step >= starts.diff()[:, None])[:, None, None]
