"""One step of decoding by Mamba-3's scan, over the registered ops."""

from torch import Tensor

from fuseport.ops.compositions import mamba3

__all__ = ["mamba3_siso_step"]


def mamba3_siso_step(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The composition, see `mamba3_siso_step` there: the result, and the states after it, anew.

    Raises:
        ValueError: there are no Input_States.
    """
    if Input_States is None:
        raise ValueError("mamba3_siso_step: Input_States must be given")
    Z = None if Z is None else Z.to(V.dtype)
    Q, K = Q.to(V.dtype), K.to(V.dtype)
    given = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States)
    out, states = mamba3.mamba3_siso_step(*given)
    return out, list(states)
