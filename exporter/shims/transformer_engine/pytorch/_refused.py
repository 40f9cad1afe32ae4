"""What of the package has no form here, and how that is said."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import distributed

__all__ = ["Refused", "plain", "refuse", "refuse_parallel"]

# Options of layers that change neither a value nor a name; `ub_…` are more of them.
_TUNING = frozenset(
    [
        "delay_wgrad_compute",
        "fuse_wgrad_accumulation",
        "get_rng_state_tracker",
        "micro_batch_size",
        "return_layernorm_output_gathered",
        "rng_tracker_name",
        "save_original_input",
        "seq_length",
        "sequence_parallel",
        "sm_margin",
        "symmetric_ar_type",
    ]
)


def refuse(name: str, why: str, instead: str) -> NoReturn:
    """Raises NotImplementedError, with the name that was called."""
    raise NotImplementedError(
        f"transformer_engine's {name} {why}, which fuseport's stand-in does not: {instead}"
    )


def refuse_parallel(name: str, group: Any, size: int) -> None:
    """Raises NotImplementedError where there is more than one process.

    Args:
        name: what it is of, for the message.
        group: the processes, or None.
        size: how many where there is no group.
    """
    if group is not None:
        size = distributed.get_world_size(group)
    if size > 1:
        refuse(
            name,
            f"is divided among {size} processes",
            "merge their checkpoints, and make the model with tp_size 1 and no groups",
        )


def plain(layer: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that is not one of those that change nothing here."""
    for name in options:
        if name not in _TUNING and not name.startswith("ub_"):
            raise TypeError(f"transformer_engine's {layer} has no option {name!r}")


class Refused:
    """A class that can be imported, named and derived from, and refuses to be made."""

    _why = "computes by kernels of its own"
    _instead = "call the layers that there are"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(type(self).__name__, self._why, self._instead)
