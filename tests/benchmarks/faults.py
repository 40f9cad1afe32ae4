"""Kills writers and fails their system calls, one at a time, at every N-th call: what is left?

    python tests/benchmarks/faults.py                    # every writer, at every call
    python tests/benchmarks/faults.py bundle --sample 3  # of each call and kind, three places
    python tests/benchmarks/faults.py --keep             # into results/faults.json, too

A writer replaces something old by something new. It runs in a process that is forked from this one,
so that nothing is imported again, and `strace --inject` is attached to. After a kill, and after
ENOSPC, EIO or EROFS from the N-th call, what is there must be the old or the new, whole. A writer
that failed has to end with exit code 7 and one line, and to leave nothing beside; after a kill the
next writer has to take away what was left. `stays full` is ENOSPC from the N-th call on.

Needs strace (a Debian package) and the right to trace one's own processes.
"""

import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from filelock import FileLock

from fuseport.cli import main as fuseport

sys.path.insert(0, str(Path(__file__).parent))
from fault_writers import WRITERS, Writer

RESULTS = Path(__file__).parent / "results" / "faults.json"

_CHANGES = (
    "write", "pwrite64", "writev", "ftruncate", "fallocate", "fsync", "fdatasync", "openat", "open",
    "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat", "symlink",
    "symlinkat", "unlink", "unlinkat", "rmdir", "chmod", "fchmod", "fchmodat", "fchmodat2",
    "copy_file_range", "sendfile", "flock", "getdents64", "close",
)  # fmt: skip
_FULL = {
    "write",
    "pwrite64",
    "writev",
    "ftruncate",
    "fallocate",
    "fsync",
    "mkdir",
    "copy_file_range",
}
MISSING = 5  # the exit code, as of fuseport, where nothing can be injected

# What each kind of fault is to strace, and which calls it comes from.
KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "kill": ("signal=KILL:when={n}", lambda call: True),
    "ENOSPC": ("error=ENOSPC:when={n}", lambda call: call not in ("flock", "close")),
    "EIO": ("error=EIO:when={n}", lambda call: call != "flock"),
    "EROFS": ("error=EROFS:when={n}", lambda call: call not in ("flock", "close", "write")),
    "ENOLCK": ("error=ENOLCK:when={n}", lambda call: call == "flock"),
    "stays full": ("error=ENOSPC:when={n}+", lambda call: call in _FULL),
}


@dataclass(frozen=True)
class Ended:
    """How a writer's process ended: its exit code, or minus its signal; and what it printed."""

    code: int
    printed: str
    injected: bool
    calls: "Counter[str]"


class Wrong(Exception):
    """What is not as it has to be after a fault."""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--sample", type=int, help="Of each call and kind, so many places.")
@click.option("--keep", is_flag=True, help="Put the figures into the results.")
@click.option("--list", "listed", is_flag=True, help="Print the writers.")
def main(names: tuple[str, ...], sample: int | None, keep: bool, listed: bool) -> None:
    if listed:
        click.echo("\n".join(WRITERS))
        return
    if reason := unable():
        click.echo(reason, err=True)
        sys.exit(MISSING)
    parts, failures = {}, []
    for name in names or WRITERS:
        parts[name] = found = inject(WRITERS[name], sample)
        failures += found["failures"]
        points = sum(found["points"].values())
        click.echo(f"{name}: {points} points, {len(found['failures'])} not survived")
    for line in failures:
        click.echo(line)
    if keep:
        _keep(parts)
    sys.exit(bool(failures))


def unable() -> str | None:
    """Why nothing can be injected here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian, Ubuntu: apt install strace)"
    try:
        ended = _run(lambda: os.close(os.open("/", os.O_RDONLY)), ["-e", "trace=openat"])
    except OSError as error:
        return f"strace cannot trace here: {error}"
    return None if ended.calls["openat"] == 1 else "strace sees no system calls here"


def inject(writer: Writer, sample: int | None = None) -> dict[str, Any]:
    """All kinds of faults at all calls of a writer; or a sample of the places."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if writer.warm:
            with _prepared(writer, folder) as place:
                writer.write(place)
        with _prepared(writer, folder) as place:
            ended = _run(lambda: writer.write(place), ["-e", f"trace={_set(writer)}"])
            if ended.code or (state := writer.state(place)) != "new" or writer.left(place):
                why = ended.printed or f"{state}, beside: {writer.left(place)}"
                raise click.ClickException(f"{writer.name} does not work: {why}")
            counted = ended.calls
        points: Counter[str] = Counter()
        ends: Counter[str] = Counter()
        failures = []
        for kind in writer.kinds or KINDS:
            fault, applies = KINDS[kind]
            for call in sorted(filter(applies, counted)):
                for n in _places(counted[call], sample):
                    what = f"{writer.name}: {kind} at {call} {n} of {counted[call]}"
                    with _prepared(writer, folder) as place:
                        try:
                            ends[_one(writer, place, kind, f"{call}:{fault.format(n=n)}")] += 1
                        except Wrong as error:
                            failures.append(f"{what}: {error}")
                    points[kind] += 1
    return {
        "places": "all" if sample is None else f"{sample} of each call",
        "calls": dict(sorted(counted.items())),
        "points": dict(points),
        "ends": dict(sorted(ends.items())),
        "failures": failures,
    }


def _one(writer: Writer, place: Path, kind: str, fault: str) -> str:
    """Run a writer with one fault, and look at what is left; in a word, how it ended."""
    call = fault.partition(":")[0]
    ended = _run(lambda: writer.write(place), ["-e", f"trace={call}", "-e", f"inject={fault}"])
    state = writer.state(place)
    if state not in ("old", "new"):
        raise Wrong(f"what is there is {state}")
    if not ended.injected:
        raise Wrong(f"no such call (exit code {ended.code}): {ended.printed}")
    if ended.code == -signal.SIGKILL:
        again = _run(lambda: writer.write(place), ["-e", "trace=none"])
        if again.code not in writer.again or writer.state(place) != "new":
            raise Wrong(f"the next writer ends with {again.code}: {again.printed}")
    elif ended.code == 0:
        if state != "new":
            raise Wrong("exit code 0, and nothing was written")
    elif ended.code not in writer.codes:
        raise Wrong(f"exit code {ended.code}: {ended.printed}")
    elif len(ended.printed.splitlines()) != 1 or not ended.printed.startswith("fuseport: "):
        raise Wrong(f"not one line: {ended.printed}")
    elif state == "new" and "nothing was changed" in ended.printed:
        raise Wrong(f"it was changed: {ended.printed}")
    if left := writer.left(place):
        raise Wrong(f"left beside: {', '.join(left)}")
    return f"{'killed' if ended.code < 0 else f'exit code {ended.code}'}, {state}"


def _run(write: Callable[[], object], options: Sequence[str]) -> Ended:
    """Run it in a process of its own, as a command of fuseport, under strace."""
    with tempfile.TemporaryFile() as said, tempfile.NamedTemporaryFile() as log:
        waits, go = os.pipe()
        ready, there = os.pipe()
        if not (pid := os.fork()):
            _be_traced(write, said.fileno(), there, waits)
        os.read(ready, 1)
        command = ["strace", "-f", "-o", log.name, *options, "-p", str(pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            line = strace.stderr.readline()
            os.write(go, b"x")
            _, status = os.waitpid(pid, 0)
            rest = strace.stderr.read()
        for descriptor in (waits, go, ready, there):
            os.close(descriptor)
        if " attached" not in line:
            raise OSError(line.strip() or rest.strip())
        said.seek(0)
        printed = said.read().decode()
        text = Path(log.name).read_text(errors="replace")
    each: dict[str, Counter[str]] = {}
    for process, call in re.findall(r"^(\d+) +(\w+)\(", text, re.MULTILINE):
        each.setdefault(process, Counter())[call] += 1
    most: Counter[str] = Counter()
    for counter in each.values():
        most |= counter  # `when` counts the calls of each process and thread
    killed = "killed by SIGKILL" in text
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, printed, killed or "(INJECTED)" in text, most)


def _be_traced(write: Callable[[], object], said: int, there: int, waits: int) -> None:
    """The process that is traced: waits, writes, and ends, whatever comes."""
    code = 70
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout = sys.stderr = io.TextIOWrapper(_Writev(), write_through=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fuseport.add_command(click.Command("write-it", callback=write))
        os.write(there, b"x")
        os.read(waits, 1)
        fuseport.main(["write-it"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Writev(io.RawIOBase):
    """Standard error by another system call than files: what it says is no fault's."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.pwritev(2, [data], os.fstat(2).st_size)


@contextmanager
def _prepared(writer: Writer, folder: Path) -> Iterator[Path]:
    """A folder with the old state in it."""
    place = folder / "place"
    place.mkdir()
    try:
        writer.prepare(place)
        yield place
    finally:
        shutil.rmtree(place)


def _set(writer: Writer) -> str:
    # With `?`, what an architecture does not have is left out.
    return ",".join(f"?{call}" for call in (writer.calls or _CHANGES))


def _places(count: int, sample: int | None) -> list[int]:
    if sample is None or count <= sample:
        return list(range(1, count + 1))
    return sorted({1 + round(i * (count - 1) / max(1, sample - 1)) for i in range(sample)})


def _keep(parts: dict[str, Any]) -> None:
    with FileLock(Path(tempfile.gettempdir()) / "fuseport-faults.lock"):
        _merge(parts)


def _merge(parts: dict[str, Any]) -> None:
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"parts": {}}
    parts = {**before["parts"], **parts}
    strace = subprocess.run(["strace", "-V"], capture_output=True, text=True, check=True).stdout
    whole = {
        "command": "python tests/benchmarks/faults.py --keep",
        "environment": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "strace": strace.split("\n")[0].rpartition(" ")[2],
            "torch": importlib.metadata.version("torch"),
        },
        "points": sum(sum(part["points"].values()) for part in parts.values()),
        "not survived": sum(len(part["failures"]) for part in parts.values()),
        "parts": parts,
    }
    RESULTS.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
