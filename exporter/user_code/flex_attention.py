"""`torch.nn.attention.flex_attention` where it is exported or differentiated without a GPU.

There torch has no form for it: no format takes its operator, and on the CPU it refuses gradients.
What it computes is attention with scores that a function of the model's modifies and another one
masks, as its documentation has it; here that is computed by plain operators, with all scores in
memory. On a GPU, and outside of a capture, it is torch's own.

He et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

__all__ = ["allow", "ours"]

_THEIRS = theirs.flex_attention, theirs.create_block_mask
_LARGEST = 2**30 - 1  # a block of a mask that torch makes where there is none


def allow() -> None:
    """Have code that is imported from now on take these functions for torch's of the same names."""
    theirs.flex_attention = _flex_attention
    theirs.create_block_mask = _create_block_mask


def ours(function: Any) -> Any:
    """What is in the place of one of torch's functions; any other, as it is."""
    return {_THEIRS[0]: _flex_attention, _THEIRS[1]: _create_block_mask}.get(function, function)


class Mask(BlockMask):
    """A mask that is asked for when scores are there: it keeps no blocks."""

    def __init__(self, mask_mod: Callable[..., Tensor], lengths: tuple[Any, Any]) -> None:
        self.mask_mod = mask_mod
        self.seq_lengths = lengths

    def to(self, device: Any) -> "Mask":
        """The same: it has no tensors."""
        return self

    def _adjust(self, new_q_len: Any, new_kv_len: Any) -> "Mask":
        return Mask(self.mask_mod, (new_q_len, new_kv_len))


@functools.wraps(_THEIRS[1])
def _create_block_mask(
    mask_mod: Callable[..., Tensor], B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, *args: Any, **by: Any
) -> BlockMask:
    # Without a word for a device torch takes the accelerator that is here.
    device = args[0] if args else by.get("device")
    on_gpu = torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")
    if on_gpu and not torch.compiler.is_exporting():
        made: BlockMask = _THEIRS[1](mask_mod, B, H, Q_LEN, KV_LEN, *args, **by)
        return made
    return Mask(mask_mod, (Q_LEN, KV_LEN))


@functools.wraps(_THEIRS[0])
def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **others: Any,
) -> Any:
    ours = isinstance(block_mask, Mask) or torch.compiler.is_exporting()
    if query.is_cuda and not ours:
        named = {"return_lse": return_lse, "kernel_options": kernel_options, **others}
        return _THEIRS[0](query, key, value, score_mod, block_mask, scale, enable_gqa, **named)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("flex_attention: query, key and value have four dimensions")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"flex_attention: {query.shape[1]} heads of queries and {key.shape[1]} of keys want "
            "enable_gqa=True"
        )
    mask_mod = _mask_mod(block_mask, query.shape[2], key.shape[2])
    scores = _scores(query, key, score_mod, mask_mod, scale)
    masked = (scores == -math.inf).all(dim=-1, keepdim=True)  # rows of nothing but it give zeros
    weights = torch.where(masked, 0.0, scores).softmax(dim=-1)
    weights = torch.where(masked, 0.0, weights).to(query.dtype)
    y = weights @ _for_each_head(value, query).to(query.dtype)
    asked = others.get("return_aux")
    if not return_lse and asked is None:
        return y
    sums = torch.where(masked, 0.0, scores).logsumexp(dim=-1)
    sums = torch.where(masked.squeeze(-1), -math.inf, sums)
    if asked is None:
        return y, sums
    largest = scores.amax(dim=-1)
    return y, theirs.AuxOutput(sums if asked.lse else None, largest if asked.max_scores else None)


def _mask_mod(mask: BlockMask | None, queries: Any, keys: Any) -> Callable[..., Tensor] | None:
    if mask is None:
        return None
    block = 0 if isinstance(mask, Mask) else min(mask.BLOCK_SIZE)
    if block < _LARGEST and tuple(mask.seq_lengths) != (queries, keys):
        raise ValueError(
            f"flex_attention: the mask is of {tuple(mask.seq_lengths)} queries and keys, and there "
            f"are {(queries, keys)}"
        )
    mask_mod: Callable[..., Tensor] = mask.mask_mod
    return mask_mod


def _scores(
    query: Tensor,
    key: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    scale: float | None,
) -> Tensor:
    """Modified and masked, in float32 or, of float64, in that."""
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = _for_each_head(key, query).to(precise)
    scores = query.to(precise) @ keys.transpose(-2, -1)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    with _IndexedByTensors():
        if score_mod is not None:
            scores = _at_all_places(score_mod, 1)(scores, *places).to(precise)
        if mask_mod is not None:
            scores = torch.where(_at_all_places(mask_mod, 0)(*places), scores, -math.inf)
    return scores


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values with a head for each of the queries', and a batch."""
    if (heads := query.shape[1] // x.shape[1]) != 1:
        x = x.repeat_interleave(heads, dim=1)
    return x.expand(query.shape[0], *x.shape[1:])


def _at_all_places(function: Callable[..., Tensor], beside: int) -> Callable[..., Tensor]:
    """A function of places in batch, heads, queries and keys, for all of them at once.

    Args:
        function: of numbers as tensors without a dimension.
        beside: how many arguments come before the places, of all four dimensions.
    """
    for dimension in (3, 2, 1, 0):
        places = [0 if i == dimension else None for i in range(4)]
        function = torch.vmap(function, in_dims=(*[0] * beside, *places))
    return function


class _IndexedByTensors(TorchFunctionMode):
    """`bias[head, query - key]` with tensors that stand for numbers, of which no number is made."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            x, index = args
            parts = index if isinstance(index, tuple) else (index,)
            numbers = all(isinstance(part, Tensor | int) for part in parts)
            if numbers and any(isinstance(part, Tensor) for part in parts):
                taken = [
                    part if isinstance(part, Tensor) else torch.tensor(part, device=x.device)
                    for part in parts
                ]
                return torch.ops.aten.index(x, taken)
        return function(*args, **(kwargs or {}))
