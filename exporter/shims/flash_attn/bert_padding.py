"""Batches without their padding, and back: rows of a tensor, chosen and put into their places."""

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

_Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of (n, …) by int64 `indices`, (k,): (k, …)."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and all rows, through which no gradient goes."""
    return index_first_axis(input, indices), input.detach()


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, …) of the rows of `values`, (k, …), at `indices`, and zeros elsewhere."""
    empty = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return empty.index_put((indices,), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(k, …), rows that `unpad_input` chose by `indices` → (batch, seqlen, …), else zeros."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> _Unpadded:
    """The rows of a batch that are not padding.

    How many there are depends on the mask. A program has that number in it as one that it computes,
    which not every format can.

    Args:
        hidden_states: (b, l, …).
        attention_mask: (b, l), nonzero where a row is to be kept.
        unused_mask: (b, l), nonzero where a row is kept that is not used, or None.

    Returns:
        The rows, (k, …); their places in (b·l), int64, (k,); where sequences begin and the end of
        the last, (b + 1,), int32; l, which no sequence is longer than (theirs is the length of the
        longest, a number that no program has before it runs); and how many of each sequence are
        used, (b,), int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _begins(lengths), attention_mask.shape[1], used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences each.

    Args:
        hidden_states: (b, l, …).
        attention_mask_in_length: (b, l), the lengths of a row's sequences, and zeros after them.

    Returns:
        The first four of `unpad_input`; sequences are as many as there are lengths above 0.
    """
    lengths = attention_mask_in_length
    step = torch.arange(hidden_states.shape[1], device=lengths.device)
    indices = (step < lengths.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    flat = lengths.flatten()
    found = flat.index_select(0, flat.nonzero().flatten()).to(torch.int32)
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _begins(found), hidden_states.shape[1]


def _begins(lengths: Tensor) -> Tensor:
    ends = lengths.cumsum(0, dtype=torch.int32)
    return torch.cat([ends.new_zeros(1), ends])
