"""Which runtimes a command uses, and why one of them must not or cannot run what there is."""

from collections.abc import Sequence
from pathlib import Path

from fuseport.exporter import admission, runtimes
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.errors import Missing, UnsafeInput

__all__ = ["chosen_runtimes", "unavailable"]


def chosen_runtimes(names: Sequence[str] | None) -> tuple[str, ...]:
    """The runtimes that are meant: all for None.

    Raises:
        UsageError: a name is unknown.
        Missing: one that was named is not installed.
    """
    if names is None:
        return runtimes.RUNTIMES
    for name in names:
        reason = runtimes.get(name).missing()
        if reason is not None:
            raise Missing(f"{name}: {reason}")
    return tuple(dict.fromkeys(names))


def unavailable(runtime: str, bundle: Bundle, artifact: Path | None, *, named: bool) -> str | None:
    """Why a runtime must not or cannot run what there is; None if it can.

    Raises:
        UnsafeInput: the user named it or the artifact, which is a program that is not trusted; or
            one that is has what no export writes in it.
        CorruptInput: a program is damaged.
    """
    reason = admission.refused(runtime, bundle, artifact)
    if reason is not None and (named or artifact is not None):
        raise UnsafeInput(f"{runtime}: {reason}")
    if reason is None:
        admission.check_programs(runtime, bundle, artifact)
    return reason or runtimes.get(runtime).missing()
