"""Which keys queries see: by their places in a sequence, and by the blocks that both are in.

Lengths of blocks may be dynamic sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._sizes import always

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "Reach",
]


class Reach(NamedTuple):
    """How many keys a query sees before its own place, and after it; None for all."""

    back: int | None
    ahead: int | None
    from_end: bool
    """Whether the last query and the last key are at one place, or else the first ones."""

    def allowed(self, length: int, seen: int, device: Any) -> Tensor:
        """(length, seen): which keys are seen."""
        place = torch.arange(length, device=device)[:, None] + self.from_end * (seen - length)
        behind = place - torch.arange(seen, device=device)
        allowed = torch.ones_like(behind, dtype=torch.bool)
        if self.back is not None:
            allowed = allowed & (behind <= self.back)
        return allowed if self.ahead is None else allowed & (behind >= -self.ahead)


class AttentionBias:
    """What may be an `attn_bias`; without a `reach`, one that attention does not take here."""

    HOLDS_DENSE_TENSOR: ClassVar[bool] = False
    reach: Reach | None = None

    def to(self, device: Any) -> Self:
        """Itself: it has no tensors, but for a bias, which is where it was made."""
        return self

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """(*shape,), shape (…, l, m): 0 where a key is seen, and -inf elsewhere.

        Raises:
            NotImplementedError: there is no such bias here.
        """
        if self.reach is None:
            raise NotImplementedError(
                f"fuseport's stand-in for xformers does not materialize a {type(self).__name__}"
            )
        return _filled(self.reach.allowed(shape[-2], shape[-1], device), dtype).expand(tuple(shape))


class LowerTriangularMask(AttentionBias):
    """Query i sees keys up to i."""

    reach = Reach(None, 0, False)

    def __init__(self, *tensor_args: Any, **kwargs: Any) -> None:
        """Arguments, of several versions, say on which device it is, and have no effect."""

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        """The same with (b, h, l, m) added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask` with (b, h, l, m) added to the scores."""

    HOLDS_DENSE_TENSOR = True

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self._bias = bias

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The mask and the bias."""
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """A query sees keys that are not nearer to the last key than it is to the last query."""

    reach = Reach(None, 0, True)

    def make_local_attention(
        self, window_size: int
    ) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        """The same for the last `window_size` of these keys alone."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """`LowerTriangularFromBottomRightMask` for the last `_window_size` of these keys alone."""

    def __init__(self, _window_size: int) -> None:
        self._window_size = _window_size
        self.reach = Reach(_last(_window_size), 0, True)


class LocalAttentionFromBottomRightMask(AttentionBias):
    """A query sees so many keys before and after its place, the last of both at one place."""

    def __init__(self, window_left: int, window_right: int) -> None:
        if window_left < 0 or window_right < 0:
            raise ValueError(f"xformers: a window is ({window_left}, {window_right}): below 0")
        self.window_left, self.window_right = window_left, window_right
        self.reach = Reach(window_left, window_right, True)


@dataclass
class _SeqLenInfo:
    """The lengths of blocks that follow one another."""

    lengths: list[Any]

    @property
    def seqstart_py(self) -> list[Any]:
        """Where each block begins, and the end of the last."""
        return [*accumulate(self.lengths, initial=0)]

    @property
    def seqstart(self) -> Tensor:
        """`seqstart_py`, int32."""
        lengths = [torch.scalar_tensor(length, dtype=torch.int32) for length in self.lengths]
        return F.pad(torch.stack(lengths).cumsum(0, dtype=torch.int32), (1, 0))

    @property
    def max_seqlen(self) -> Any:
        """The longest block's."""
        return max(self.lengths)

    @property
    def min_seqlen(self) -> Any:
        """The shortest block's."""
        return min(self.lengths)

    def intervals(self) -> Iterator[tuple[Any, Any]]:
        """Where each block begins and ends."""
        return pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[Any] | None = None) -> list[Tensor]:
        """(1, n, …) as blocks, (1, length, …), or as many in one, of equal lengths, (size, …)."""
        sizes = [1] * len(self.lengths) if batch_sizes is None else batch_sizes
        firsts = [*accumulate(sizes, initial=0)][:-1]
        lengths = [self.lengths[first] for first in firsts]
        each = x.split([size * length for size, length in zip(sizes, lengths, strict=True)], 1)
        return [
            part.reshape(size, length, *x.shape[2:])
            for part, size, length in zip(each, sizes, lengths, strict=True)
        ]


class BlockDiagonalMask(AttentionBias):
    """Queries see all keys of the block with their block's number.

    Args:
        q_seqinfo: the blocks of queries.
        k_seqinfo: those of keys, as many.
        _batch_sizes: how many blocks, of equal lengths, were one tensor each; None for one.
    """

    reach: Reach = Reach(None, None, False)

    def __init__(
        self,
        q_seqinfo: _SeqLenInfo,
        k_seqinfo: _SeqLenInfo,
        _batch_sizes: Sequence[Any] | None = None,
    ) -> None:
        self.q_seqinfo, self.k_seqinfo, self._batch_sizes = q_seqinfo, k_seqinfo, _batch_sizes

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[Any], kv_seqlen: Sequence[Any] | None = None, *, device: Any = None
    ) -> Self:
        """By the lengths of blocks, of keys those of queries unless given.

        Raises:
            ValueError: there are not as many of both.
        """
        of_q = _SeqLenInfo([*q_seqlen])
        if kv_seqlen is None:
            return cls(of_q, of_q)
        of_k = _SeqLenInfo([*kv_seqlen])
        if len(of_q.lengths) != len(of_k.lengths):
            raise ValueError(
                f"xformers: there are {len(of_q.lengths)} blocks of queries and "
                f"{len(of_k.lengths)} of keys"
            )
        return cls(of_q, of_k)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """A block for each entry of each of (b, l, …), and all in one, (1, Σ b·l, …)."""
        found = cls.from_seqlens(_lengths(tensors))
        found._batch_sizes = [t.shape[0] for t in tensors]
        return found, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """`from_tensor_list` of queries, with keys and values of other lengths."""
        found = cls.from_seqlens(_lengths(tensors_q), _lengths(tensors_k))
        found._batch_sizes = [t.shape[0] for t in tensors_q]
        values = None if tensors_v is None else _joined(tensors_v)
        return found, _joined(tensors_q), _joined(tensors_k), values

    def groups(self) -> tuple[list[int], list[Any], list[Any]]:
        """How many neighbours have which length of queries and of keys."""
        counts: list[int] = []
        of_q: list[Any] = []
        of_k: list[Any] = []
        for length, seen in zip(self.q_seqinfo.lengths, self.k_seqinfo.lengths, strict=True):
            if counts and _same(length, of_q[-1]) and _same(seen, of_k[-1]):
                counts[-1] += 1
            else:
                counts.append(1)
                of_q.append(length)
                of_k.append(seen)
        return counts, of_q, of_k

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """(*shape,), shape (…, l, m): 0 where a key is seen, and -inf elsewhere."""
        blocks = zip(self.q_seqinfo.lengths, self.k_seqinfo.lengths, strict=True)
        allowed = torch.block_diag(
            *(self.reach.allowed(length, seen, device) for length, seen in blocks)
        )
        return _filled(allowed.bool(), dtype).expand(tuple(shape))

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """(1, n, …) as the tensors that queries came from."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """(1, n, …) as the tensors that keys came from."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """The same blocks, causal by first places."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """The same blocks, causal by last places."""
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        )

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalLocalAttentionMask":
        """`make_causal` for the last `window_size` keys alone."""
        return BlockDiagonalCausalLocalAttentionMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
        """`make_causal_from_bottomright` for the last `window_size` keys alone."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Query i of a block sees keys up to i of the block with its number."""

    reach = Reach(None, 0, False)


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """In each block as `LowerTriangularFromBottomRightMask`."""

    reach = Reach(None, 0, True)


class _Local(BlockDiagonalMask):
    def __init__(
        self,
        q_seqinfo: _SeqLenInfo,
        k_seqinfo: _SeqLenInfo,
        _batch_sizes: Sequence[Any] | None = None,
        _window_size: int = 0,
    ) -> None:
        super().__init__(q_seqinfo, k_seqinfo, _batch_sizes)
        self._window_size = _window_size
        self.reach = Reach(_last(_window_size), 0, self.reach.from_end)


class BlockDiagonalCausalLocalAttentionMask(_Local, BlockDiagonalCausalMask):
    """`BlockDiagonalCausalMask` for the last `_window_size` keys alone."""


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(
    _Local, BlockDiagonalCausalFromBottomRightMask
):
    """`BlockDiagonalCausalFromBottomRightMask` for the last `_window_size` keys alone."""


class BlockDiagonalCausalWithOffsetPaddedKeysMask(AttentionBias):
    """Of a cache of keys, which there is none of here."""

    @classmethod
    def from_seqlens(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses: it decodes."""
        raise NotImplementedError(
            f"{cls.__name__} was made on fuseport's stand-in for xformers, which keeps no cache of "
            "keys: export a forward over the whole sequence, with a BlockDiagonalCausalMask"
        )


def _last(window: int) -> int:
    if window <= 0:
        raise ValueError(f"xformers: a window has at least one key, and window_size is {window}")
    return window - 1


def _filled(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, -torch.inf)


def _lengths(tensors: Sequence[Tensor]) -> list[Any]:
    return [t.shape[1] for t in tensors for _ in range(t.shape[0])]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(1, t.shape[0] * t.shape[1], *t.shape[2:]) for t in tensors], 1)


def _same(one: Any, other: Any) -> bool:
    return one is other or always(one == other)
