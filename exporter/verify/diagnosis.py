"""What a report says of a failure beside its rows: where it begins, and who is at fault."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Cause", "Diagnosis", "Divergence"]

Cause = Literal["kernel", "export", "runtime"]
"""The op's kernel against its reference, the artifact against the model, or the runtime against
another one on the same artifact."""


@dataclass(frozen=True)
class Divergence:
    """The first wrong tensor, in the order in which the program computes.

    Attributes:
        tensor: the value's name in the program's graph.
        op: what computes it, `fuseport::selective_scan` for example.
        module: path of the layer, `backbone.layers.37.mixer`; empty where none is known.
        direction: `forward`, or `backward` of that layer.
        alone: what the op gives on reference inputs: wrong too, so the fault is here, or right, so
            it was carried here; None where it could not be replayed.
        max_abs_error: of the tensor, in the whole program.
        bound: what that may be.
    """

    tensor: str
    op: str
    module: str
    direction: Literal["forward", "backward"]
    alone: Literal["wrong here", "carried here"] | None = None
    max_abs_error: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What is known of the failure of one artifact in one runtime, on one case.

    Attributes:
        runtime: as in the rows it speaks of, like `artifact`, `program`, `way` and `case`.
        cause: who is at fault; None where that cannot be told.
        reason: one sentence: what was compared, and what it gave.
        divergence: where it begins; None where that was not found, which `reason` explains.
        method: by values within the program, or by cutting it at ever closer places.
    """

    runtime: str
    artifact: str
    program: str
    way: str
    case: str
    cause: Cause | None
    reason: str
    divergence: Divergence | None = None
    method: Literal["intermediates", "bisection"] | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Diagnosis":
        """What `dataclasses.asdict` made of one."""
        divergence = content["divergence"]
        found = None if divergence is None else Divergence(**divergence)
        return cls(**{**content, "divergence": found})
