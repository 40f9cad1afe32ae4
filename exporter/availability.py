"""Which runtimes a command uses, and why one of them must not or cannot run what there is."""

from collections.abc import Collection, Sequence
from pathlib import Path

from fuseport.exporter import admission, runtimes
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.errors import Missing, UnsafeInput, UsageError
from fuseport.exporter.runtimes import _device

__all__ = ["chosen_runtimes", "refuse", "require", "unavailable"]


def require(device: str) -> None:
    """See that a device is here.

    Raises:
        UsageError: there is none of that name.
        Missing: it is not here.
    """
    if device not in _device.DEVICES:
        raise UsageError(f"{device} is not a device; there are: {', '.join(_device.DEVICES)}")
    if reason := _device.missing(device):
        raise Missing(f"{device}: {reason}")


def chosen_runtimes(
    names: Sequence[str] | None, device: str = "cpu", ops: Collection[str] | None = None
) -> tuple[str, ...]:
    """The runtimes that are meant: all that run on a device for None.

    Args:
        names: of runtimes.
        device: that they run on.
        ops: the operators of fused ops in what is to be run, where they are known: of all runtimes,
            those that these make no difference to are left out.

    Raises:
        UsageError: a name is unknown, of a runtime or device; or one that was named does not run on
            the device.
        Missing: the device is not here, or a runtime that was named is not installed.
    """
    require(device)
    if names is None:
        able = (name for name in runtimes.RUNTIMES if device in runtimes.devices(name))
        return tuple(name for name in able if ops is None or runtimes.differs(name, ops, device))
    for name in names:
        if device not in runtimes.devices(name):
            others = ", ".join(chosen_runtimes(None, device))
            raise UsageError(f"{name} does not run on {device}; those that do: {others}")
        reason = runtimes.get(name).missing()
        if reason is not None:
            raise Missing(f"{name}: {reason}")
    return tuple(dict.fromkeys(names))


def refuse(names: Sequence[str], bundle: Bundle) -> None:
    """See that a bundle has what runtimes that were named may load, before any work.

    Raises:
        UsageError: it has no file of a runtime's format.
        UnsafeInput: it is a program that is not trusted.
    """
    formats = {None, *(entry["format"] for entry in bundle.manifest["artifacts"])}
    for name in names:
        if (form := runtimes.get(name).FORMAT) not in formats:
            raise UsageError(
                f"{bundle.folder}: nothing in it is for the runtime {name}, which runs {form}"
            )
        if reason := admission.refused(name, bundle, None):
            raise UnsafeInput(f"{name}: {reason}")


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
