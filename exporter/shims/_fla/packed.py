"""Packed sequences in the mixers of fla: what is before one has decayed to nothing."""

from torch import Tensor

from fuseport.ops.packed import Packed

__all__ = ["apart", "numbers", "refuse_states"]


def apart(g: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Logarithms of decays, (b, l, …), which are -∞ where sequences begin."""
    begins = Packed.of(cu_seqlens, g.shape[1]).begins()
    return g.masked_fill(begins.reshape(-1, *[1] * (g.dim() - 2)), float("-inf"))


def numbers(cu_seqlens: Tensor, steps: int) -> Tensor:
    """(1, l), int32: the number of each step's sequence."""
    return Packed.of(cu_seqlens, steps).sequence.int().unsqueeze(0)


def refuse_states(initial_state: Tensor | None, output_final_state: bool | None) -> None:
    """Raises NotImplementedError if there are states, of which sequences would have one each."""
    if initial_state is not None or output_final_state:
        raise NotImplementedError(
            "with cu_seqlens, and states, which packed sequences have none of"
        )
