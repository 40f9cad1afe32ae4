"""Names of optimizers, which refuse to be made."""

from ._refused import ForTraining

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


class FusedAdagrad(ForTraining):
    """Refuses."""


class FusedAdam(ForTraining):
    """Refuses."""


class FusedLAMB(ForTraining):
    """Refuses."""


class FusedNovoGrad(ForTraining):
    """Refuses."""


class FusedSGD(ForTraining):
    """Refuses."""
