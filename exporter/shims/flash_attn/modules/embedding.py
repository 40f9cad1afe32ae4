"""Embeddings of words, of positions and of kinds of tokens, on one device only."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.fused_dense import refuse_parallel

__all__ = [
    "BertEmbeddings",
    "ColumnParallelEmbedding",
    "GPT2Embeddings",
    "ParallelGPT2Embeddings",
    "VocabParallelEmbedding",
]


class GPT2Embeddings(nn.Module):
    """Embeddings of words and positions, added.

    Args:
        embed_dim: width of what is returned.
        vocab_size: of the words.
        max_position_embeddings: as many positions; none are embedded if 0 or less.
        padding_idx: a word whose embedding has no gradient, or None.
        word_embed_proj_dim: width of the words' own, of which a linear layer makes embed_dim.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx, **factory)
        self.project_in = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(width, embed_dim, bias=False, **factory)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **factory)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(b, l) words, and (b, l) positions or None for 0 to l - 1 → (b, l, embed_dim)."""
        found: Tensor = self.word_embeddings(input_ids)
        if self.project_in is not None:
            found = self.project_in(found)
        if self.max_position_embeddings > 0:
            found = found + self.position_embeddings(_positions(input_ids, position_ids))
        return found


class BertEmbeddings(nn.Module):
    """Embeddings of words, positions and kinds of tokens, added.

    Args:
        embed_dim: width.
        vocab_size: of the words.
        max_position_embeddings: as many positions; none are embedded if 0 or less.
        type_vocab_size: as many kinds; none are embedded if 0 or less.
        padding_idx: a word whose embedding has no gradient, or None.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(
            vocab_size, embed_dim, padding_idx=padding_idx, **factory
        )
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **factory)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **factory)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """(b, l) each, positions from 0 on and kinds 0 if None → (b, l, embed_dim)."""
        found: Tensor = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            found = found + self.position_embeddings(_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            if token_type_ids is None:
                length = input_ids.shape[1]
                token_type_ids = torch.zeros(length, dtype=torch.long, device=input_ids.device)
            found = found + self.token_type_embeddings(token_type_ids)
        return found


class VocabParallelEmbedding(nn.Embedding):
    """An embedding; with a process group it refuses: it is of several devices then."""

    def __init__(
        self, num_embeddings: int, *args: Any, process_group: Any = None, **kwargs: Any
    ) -> None:
        if process_group is not None:
            refuse_parallel(f"{type(self).__name__} with a process group")
        super().__init__(num_embeddings, *args, **kwargs)
        self.process_group = process_group


class ColumnParallelEmbedding(VocabParallelEmbedding):
    """The same, for groups that share its channels."""


class ParallelGPT2Embeddings(nn.Module):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        refuse_parallel(type(self).__name__)


def _positions(input_ids: Tensor, given: Tensor | None) -> Tensor:
    if given is not None:
        return given
    return torch.arange(input_ids.shape[1], dtype=torch.long, device=input_ids.device)
