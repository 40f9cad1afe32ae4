"""Names of optimizers, which train."""

from .._refused import Refused

__all__ = ["FusedAdam", "FusedSGD"]


class FusedAdam(Refused):
    """Refuses to be made."""

    _why = "trains"
    _instead = "make it in your training script, not where the model is made or called"


class FusedSGD(FusedAdam):
    """Refuses to be made."""
