"""What a verification keeps beside its rows: of earlier runs, and for later ones."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import Bundle
from fuseport.exporter.describe import environment, own_sources
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify import resume as resuming
from fuseport.exporter.verify.outputs import Recorder, Saved, load, recording
from fuseport.exporter.verify.resume import Record, recorded

__all__ = ["Kept", "kept"]


@dataclass(frozen=True)
class Kept:
    """What is kept.

    Attributes:
        record: rows of jobs that a run before this one has done.
        recorder: of what runtimes give.
        saved: what runtimes gave elsewhere, to be judged instead of running them; None to run.
        seeds: of the cases, see `plan.seeded`.
        device: that runtimes compute on, or computed.
    """

    record: Record
    recorder: Recorder
    saved: Saved | None
    seeds: tuple[int, ...]
    device: str


@contextmanager
def kept(
    bundle: Bundle,
    options: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    resume: bool,
    save: str | Path | None,
    load_from: str | Path | None,
) -> Iterator[Kept]:
    """What a verification keeps, while it lasts.

    Args:
        bundle: that is verified.
        options: of the verification, its `device` among them, as JSON data: with others, nothing is
            taken over.
        seeds: of the cases; of loaded outputs, theirs.
        resume: take over what an earlier run of the same has done.
        save: a folder for what runtimes give.
        load_from: a folder of it, to be judged instead of running them.

    Raises:
        UsageError: options that exclude each other; or as of `recorded`, `recording` and `load`.
        CorruptInput, Missing, StorageError: as of these.
    """
    device = str(options["device"])
    other = save is not None or options.get("artifact") is not None or device != "cpu"
    if load_from is not None and other:
        raise UsageError(
            "--load-outputs runs nothing: leave --save-outputs, --artifact and --device out"
        )
    if resume and (save is not None or load_from is not None):
        raise UsageError(
            "--resume runs only what is left: outputs of the rest alone cannot be saved or loaded"
        )
    saved = None if load_from is None else load(Path(load_from), bundle)
    used = tuple(seeds) if saved is None else saved.seeds
    device = device if saved is None else saved.device
    facts = {
        "manifest": bundle.sha256,
        "options": options,
        "seeds": list(used),
        "environment": environment(),
        "fuseport": own_sources(),
        "saved": None if saved is None else str(Path(str(load_from)).resolve()),
    }
    target = None if save is None else Path(save)
    with (
        recording(target, bundle, used, device) as recorder,
        recorded(resuming.key(facts), resume=resume) as record,
    ):
        yield Kept(record, recorder, saved, used, device)
