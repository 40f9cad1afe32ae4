"""The decoding step of a scan, over the registered op."""

from torch import Tensor

from fuseport.ops.selective_state_update import selective_state_update as update_op

__all__ = ["selective_state_update", "selective_state_update_ref"]


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """The op, see `fuseport.ops.selective_state_update`.

    Args:
        state_batch_indices: (b,), which rows of `state` are meant, or None for all.
    """
    if state_batch_indices is None:
        return update_op(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    rows = state_batch_indices.long()
    chosen = state[rows]
    out = update_op(chosen, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    state[rows] = chosen
    return out


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """The same."""
    return selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
