"""What `faults.py` runs: each writer of fuseport, replacing something old by something new.

torch is imported when a writer needs it: a process without it is forked in no time.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import Bundle, open_bundle, staged
from fuseport.exporter.bundle.staging import work_folder, write_whole
from fuseport.exporter.errors import FuseportError, Missing, StorageError, UsageError

__all__ = ["WRITERS", "Writer"]


@dataclass(frozen=True)
class Writer:
    """A writer.

    Attributes:
        name: of it.
        prepare: puts the old into an empty folder.
        write: puts the new there.
        state: what is there: `old`, `new`, or else what is wrong with it.
        known: patterns of names in the folder that may be there, at any time.
        calls: system calls to fail; empty for all that change something.
        kinds: of faults; empty for all.
        codes: that it may end with when it fails.
        again: codes that it may end with where the new is there already, after a kill.
        warm: whether it can run in the process that is forked, so that imports are done.
    """

    name: str
    prepare: Callable[[Path], object]
    write: Callable[[Path], object]
    state: Callable[[Path], str]
    known: Sequence[str]
    calls: Sequence[str] = ()
    kinds: Sequence[str] = ()
    codes: Sequence[int] = (StorageError.exit_code,)
    again: Sequence[int] = (0,)
    warm: bool = True

    def left(self, folder: Path) -> list[str]:
        """What is there beside what was to be written."""
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        return sorted(n for n in names if not any(fnmatch(n, pattern) for pattern in self.known))


def _bundle(folder: Path, content: str) -> None:
    with staged(folder / "b", force=True) as (made, manifest):
        manifest["name"] = content
        (made / "weights.safetensors").write_text(content * 1000)
        (made / "samples").mkdir()
        (made / "samples" / "case0.safetensors").write_text(content)


def _bundle_state(folder: Path) -> str:
    try:
        return str(open_bundle(folder / "b").manifest["name"])
    except FuseportError as error:
        return str(error) if (folder / "b").exists() else "old"


def _report(folder: Path, content: str) -> None:
    write_whole(folder / "report.json", content.encode() * 10_000)


def _report_state(folder: Path) -> str:
    text = (folder / "report.json").read_text()
    return next((name for name in ("old", "new") if text == name * 10_000), f"{text[:9]!r} …")


def _work(folder: Path) -> None:
    """A temporary folder has no old and new: that it was filled and emptied is noted beside."""
    with _temporary(folder), work_folder() as work:
        (work / "large").write_bytes(bytes(10_000))
    write_whole(folder / "done", b"")


def _work_state(folder: Path) -> str:
    return "new" if (folder / "done").exists() else "old"


_KNOWN = {"old": "a" * 64, "new": "b" * 64}


def _trust(folder: Path, which: str) -> None:
    from fuseport.exporter.bundle import trust

    with _cache(folder):
        trust.add(_KNOWN[which])


def _trust_state(folder: Path) -> str:
    hashes = (folder / "trusted").read_text().splitlines()
    states = {(_KNOWN["old"],): "old", tuple(_KNOWN.values()): "new"}
    return states.get(tuple(hashes), f"trusted: {hashes}")


def _verify(folder: Path, rows: int, killed: bool = False) -> None:
    """A verification of three jobs, of which it resumes; as far as its record goes."""
    from fuseport.exporter.verify.plan import Job
    from fuseport.exporter.verify.report import Row
    from fuseport.exporter.verify.resume import recorded

    row = Row("eager", None, "model", "forward", "run", "c", "y", "pass")
    with _cache(folder), recorded("0" * 32, resume=True) as record:
        for case in range(rows):
            job = Job("eager", Path("w"), "forward", "run", str(case))
            if record.rows(job) is None:
                record.add(job, [row])
        if killed:
            raise StorageError("killed")
    write_whole(folder / "done", b"")


def _prepare_verify(folder: Path) -> None:
    try:
        _verify(folder, 1, killed=True)
    except StorageError:
        file = folder / "verify" / f"{'0' * 32}.jsonl"
        file.write_text(file.read_text() + '{"job": "eager · w · forw')  # as a kill cuts it off


def _verify_state(folder: Path) -> str:
    if (folder / "done").exists():
        return "new"
    file = folder / "verify" / f"{'0' * 32}.jsonl"
    if not file.exists():  # all rows were there, and the end was not told
        return "old"
    lines = file.read_text().split("\n")
    jobs = [json.loads(line)["job"][-1] for line in lines[:-1]]  # the last is cut off, or empty
    return "old" if jobs and jobs == ["0", "1", "2"][: len(jobs)] else f"rows of {jobs}"


_OF = Bundle(Path("bundle"), {}, "0" * 64)


def _prepare_outputs(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"input/x": torch.zeros(9), "truth/y": torch.ones(9)}, folder / "given.safetensors")


def _outputs(folder: Path) -> None:
    from fuseport.exporter.verify.outputs import recording
    from fuseport.exporter.verify.plan import Case, Job
    from fuseport.exporter.verify.run import Answer
    from fuseport.exporter.verify.sample import Sample

    given = folder / "given.safetensors"
    job = Job("eager", Path("w"), "forward", "run", "c")
    sample = Sample(Case("c", {}, "contiguous", 0), given, {})
    with recording(folder / "out", _OF, [0]) as recorder:
        recorder.keep(Answer(job, "done", calls={1: given}), sample)


def _outputs_state(folder: Path) -> str:
    from fuseport.exporter.verify.outputs import load

    if not (folder / "out").exists():
        return "old"
    try:
        return "new" if len(load(folder / "out", _OF).entries) == 1 else "no answer"
    except FuseportError as error:
        return str(error)


# Writes in two steps, as compilers do, what a library is to be.
_COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo 1.0; exit; }
while [ "$1" != -o ]; do shift; done
{ echo half && echo whole; } > "$2"
"""


def _prepare_library(folder: Path) -> None:
    (folder / "src" / "tiny").mkdir(parents=True)
    (folder / "src" / "tiny" / "kernel.cpp").write_text("int x;\n")
    (folder / "src" / "c++").write_text(_COMPILER)
    (folder / "src" / "c++").chmod(0o755)


def _library(folder: Path) -> None:
    from fuseport.ops import build

    os.environ["CXX"] = str(folder / "src" / "c++")
    logging.getLogger("fuseport").setLevel(logging.INFO)  # as commands have it
    build.compiler_version.cache_clear()
    source = build.Unit(folder / "src" / "tiny" / "kernel.cpp")
    with _cache(folder / "cache"):
        try:
            build.built(build.Library("tiny", (source,)))
        except build.BuildError as error:  # as `fuseport ops build` tells it
            full = isinstance(error.__cause__, OSError)
            raise (StorageError if full else Missing)(str(error)) from error


def _library_state(folder: Path) -> str:
    made = [*(folder / "cache").glob("*.so"), *(folder / "cache").glob("objects/*.o")]
    half = [path.name for path in made if path.read_text() != "half\nwhole\n"]
    if half:
        return f"half written: {half}"
    return "new" if any(path.suffix == ".so" for path in made) else "old"


def _cases(folder: Path, seed: int) -> None:
    import torch

    from fuseport.exporter.verify.vocabulary.files import dump

    torch.set_num_threads(1)
    dump(folder / "cases", only=["pixel_shuffle"], seed=seed, force=True)


def _cases_state(folder: Path) -> str:
    from fuseport.exporter.bundle import hash_file

    index = json.loads((folder / "cases" / "index.json").read_text())
    for case in index["cases"]:
        if hash_file(folder / "cases" / case["file"]) != case["sha256"]:
            return f"{case['file']} is not what the index says"
    return {0: "old", 1: "new"}[index["seed"]]


_NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(3, 2)

    def forward(self, x):
        return torch.tanh(self.one(x))
"""


def _prepare_export(folder: Path) -> None:
    import torch

    _bundle(folder, "old")
    (folder / "net.py").write_text(_NET)
    torch.save({"one.weight": torch.ones(2, 3), "one.bias": torch.zeros(2)}, folder / "net.pt")


def _export(folder: Path) -> None:
    import torch

    from fuseport.exporter import api
    from fuseport.exporter.models.user import parse_inputs

    torch.set_num_threads(1)
    with _temporary(folder), _cache(folder / "cache"):
        api.export(
            folder / "net.pt",
            folder / "b",
            model=f"{folder / 'net.py'}:Net",
            inputs=parse_inputs(["x:[batch,3]"]),
            force=True,
        )


def _export_state(folder: Path) -> str:
    try:
        return "old" if open_bundle(folder / "b").manifest.get("name") == "old" else "new"
    except FuseportError as error:
        return str(error)


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    os.environ["FUSEPORT_CACHE"] = str(folder)
    try:
        yield
    finally:
        del os.environ["FUSEPORT_CACHE"]


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _nothing(folder: Path) -> None:
    pass


def _named(*writers: Any) -> dict[str, Writer]:
    return {writer.name: writer for writer in writers}


WRITERS = _named(
    Writer("bundle", lambda f: _bundle(f, "old"), lambda f: _bundle(f, "new"), _bundle_state,
           ["b", "b/*"]),
    Writer("new bundle", _nothing, lambda f: _bundle(f, "new"), _bundle_state, ["b", "b/*"]),
    Writer("report", lambda f: _report(f, "old"), lambda f: _report(f, "new"), _report_state,
           ["report.json"]),
    Writer("temporary folder", _nothing, _work, _work_state, ["done"]),
    Writer("trust record", lambda f: _trust(f, "old"), lambda f: _trust(f, "new"), _trust_state,
           ["trusted", "trusted.lock"]),
    Writer("resume state", _prepare_verify, lambda f: _verify(f, 3), _verify_state,
           ["done", "verify", f"verify/{'0' * 32}.jsonl"]),
    Writer("saved outputs", _prepare_outputs, _outputs, _outputs_state,
           ["given.safetensors", "out", "out/*"], again=(0, UsageError.exit_code)),
    Writer("library", _prepare_library, _library, _library_state,
           ["src", "src/*", "cache", "cache/tiny-*.so", "cache/tiny.lock", "cache/objects",
            "cache/objects/*.o"], codes=(StorageError.exit_code, Missing.exit_code)),
    Writer("case files", lambda f: _cases(f, 0), lambda f: _cases(f, 1), _cases_state,
           ["cases", "cases/*"]),
    Writer("export", _prepare_export, _export, _export_state,
           ["b", "b/*", "net.py", "net.pt", "__pycache__", "__pycache__/*", "cache", "cache/*",
            "torchinductor_*"],  # torch's own, for all processes of a user
           calls=["write"], kinds=["ENOSPC"], warm=False),
)  # fmt: skip
