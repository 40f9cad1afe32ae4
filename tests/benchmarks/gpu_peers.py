"""What ops on a GPU are measured beside: packages that may be there, and may refuse to run."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from fuseport.exporter.program import one_line

__all__ = ["installed_peers", "peer_module", "peer_time"]

_PACKAGES = ("mamba_ssm", "causal_conv1d", "fla-core", "bitsandbytes")
_STAND_INS = Path(__file__).parents[2] / "exporter" / "shims"


def peer_module(name: str) -> Any | None:
    """A module of a peer; None where it is not, or is a stand-in of fuseport's.

    What is there and cannot be imported raises what it raises: it is not the same as none.
    """
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    file = getattr(found, "__file__", None)
    return None if file and Path(file).is_relative_to(_STAND_INS) else found


def peer_time(measure: Callable[..., float | None], *arguments: Any) -> dict[str, Any]:
    """`peer_us` of a row, as `measure` gives it of the arguments: null where there is no peer.

    Where the peer raises, it is null, too, and `peer` says what.
    """
    try:
        return {"peer_us": measure(*arguments)}
    except Exception as error:  # other people's code
        return {"peer_us": None, "peer": one_line(error)}


def installed_peers() -> dict[str, str]:
    """The versions of the peers' packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
