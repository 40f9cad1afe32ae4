"""What models import to generate text; decoding with states works, generation itself does not."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

__all__ = [
    "GenerationMixin",
    "InferenceParams",
    "capture_graph",
    "decode",
    "sample",
    "update_graph_cache",
]


@dataclass
class InferenceParams:
    """How far decoding is, and the states of each layer by its index.

    Attributes:
        max_seqlen: of the sequence.
        max_batch_size: of the batch.
        seqlen_offset: tokens so far.
        batch_size_offset: where the batch begins.
        key_value_memory_dict: the states.
        lengths_per_sample: (b,), or None.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Back to the beginning; the states stay."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class GenerationMixin:
    """What a model that generates inherits from; here it cannot."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any
    ) -> Any:
        """Raises NotImplementedError: the model has it, or has none."""
        raise NotImplementedError(f"{type(self).__name__} has no allocate_inference_cache")

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses."""
        _refuse("GenerationMixin.generate")


def decode(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    _refuse("decode")


def sample(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    _refuse("sample")


def capture_graph(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    _refuse("capture_graph")


def update_graph_cache(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    _refuse("update_graph_cache")


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"utils.generation.{name} was called on fuseport's stand-in, which does not "
        "generate: export the model, and generate with the artifact"
    )
