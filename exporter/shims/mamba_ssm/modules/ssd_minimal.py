"""The chunked scan as listing 1 of Mamba-2's paper writes it, of given decays."""

from torch import Tensor

from fuseport.ops.ssd_chunk_scan import ssd_discrete

__all__ = ["ssd_minimal_discrete"]


def ssd_minimal_discrete(
    X: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    block_len: int,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan h_t = exp(A_t)·h_{t-1} + X_t B_tᵀ, Y_t = h_t C_t.

    Args:
        X: (b, l, H, P).
        A: (b, l, H), the decays' logarithms.
        B: (b, l, H, N).
        C: (b, l, H, N).
        block_len: of chunks, which changes no value; the original wants it to divide l.
        initial_states: (b, 1, H, P, N), or None for zeros.

    Returns:
        Y, (b, l, H, P), and the last states, (b, H, P, N), in X's dtype.
    """
    initial = None if initial_states is None else initial_states[:, 0]
    out, last = ssd_discrete(X, A, B, C, initial_states=initial)
    return out, last.to(X.dtype)
