"""Writers that share a place, and what each leaves when it cannot write."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fuseport.exporter import interrupts
from fuseport.exporter.bundle import open_bundle, staged, staging, trust
from fuseport.exporter.errors import StorageError, UsageError
from fuseport.exporter.formats._sink import sink


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_commit_stage_is_free_of_torch() -> None:
    """Fault 19: so that a process of it alone can be killed at every system call, and fast."""
    code = "import sys, fuseport.exporter.bundle; print([m for m in sys.modules if m == 'torch'])"
    with python(code) as process:
        assert process.communicate() == ("[]\n", "")


# Forks writers, which replace a bundle, in rounds; each says how it went, in a line.
WRITERS = """
import os, sys
from pathlib import Path
from fuseport.exporter.bundle import staged
from fuseport.exporter.errors import FuseportError
target, count, rounds, force = sys.argv[1:]
target, force = Path(target), force == "True"

def write(name):
    for i in range(int(rounds)):
        try:
            with staged(target, force=force) as (folder, manifest):
                manifest["name"] = name
                for part in range(2):
                    (folder / f"part{part}").write_text(f"{name} {i} " * 500)
            said = "written"
        except FuseportError as error:
            said = f"{error.exit_code} {error}"
        os.write(1, f"{name}: {said}\\n".encode())

for n in range(int(count)):
    if not os.fork():
        try:
            write(f"writer {n}")
        finally:
            os._exit(0)
for n in range(int(count)):
    os.wait()
"""


def written_by(target: Path, count: int, rounds: int, *, force: bool) -> list[list[str]]:
    """What each of so many writers at once said, as `[name, said]`, line by line."""
    with python(WRITERS, target, count, rounds, force) as process:
        out, errors = process.communicate(timeout=500)
    assert errors == ""
    lines = [line.split(": ", 1) for line in out.splitlines()]
    assert len(lines) == count * rounds
    return lines


def test_fifty_writers_to_one_path_leave_one_whole_bundle(tmp_path: Path) -> None:
    """Fault 21. Each of 1,000 bundles was there, whole, for a while; the last one still is."""
    target = tmp_path / "b"
    said = written_by(target, 50, 20, force=True)
    assert {line for _, line in said} == {"written"}
    bundle = open_bundle(target)  # every file has the hash in its manifest
    for part in range(2):
        text = (target / f"part{part}").read_text()
        assert text == f"{bundle.manifest['name']} 19 " * 500
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_of_writers_without_force_one_alone_writes(tmp_path: Path) -> None:
    """Fault 21. The others say that a bundle is there; none replaces what it did not see."""
    target = tmp_path / "b"
    said = written_by(target, 8, 1, force=False)
    written = [name for name, line in said if line == "written"]
    assert len(written) == 1
    assert open_bundle(target).manifest["name"] == written[0]
    others = {line for _, line in said if line != "written"}
    assert others == {f"2 {target}: a bundle is there; --force replaces it"}
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_without_force_nothing_is_replaced_between_the_look_and_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 21. Writers look and rename behind a lock on the folder that the target is in."""
    swap = staging._swap_in

    def looked(folder: Path, target: Path) -> None:
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        swap(folder, target)

    monkeypatch.setattr(staging, "_swap_in", looked)
    with staged(tmp_path / "b", force=False) as (folder, _):
        (folder / "x").touch()
    open_bundle(tmp_path / "b")


def test_what_is_in_place_but_not_synced_is_not_called_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 20."""

    def write(name: str) -> None:
        with staged(tmp_path / "b", force=True) as (_, manifest):
            manifest["name"] = name

    write("one")
    sync = staging._sync_one

    def fails(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(staging, "_sync_one", fails)
    with pytest.raises(StorageError, match=r"is written, but .* Input/output error"):
        write("two")
    assert open_bundle(tmp_path / "b").manifest["name"] == "two"


def test_all_is_on_disk_before_the_rename_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 19, of a power failure: a name must not outlive what it names."""
    synced: list[int] = []
    at_swap: dict[str, int] = {}
    swap = staging._swap_in

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)

    def swapped(folder: Path, target: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            at_swap[path.name] = path.stat().st_ino
        assert set(at_swap.values()) <= set(synced)
        synced.clear()
        swap(folder, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(staging, "_swap_in", swapped)
    with staged(tmp_path / "b", force=False) as (folder, _):
        (folder / "samples").mkdir()
        (folder / "samples" / "x").write_text("x")
    assert at_swap.keys() >= {"manifest.json", "samples", "x"}
    assert synced == [tmp_path.stat().st_ino]
    synced.clear()
    staging.write_whole(tmp_path / "r.json", b"{}")
    assert synced == [(tmp_path / "r.json").stat().st_ino, tmp_path.stat().st_ino]


class TestAbandoned:
    def leave(self, code: str, *arguments: object) -> None:
        """Have a process killed within `code`."""
        with python(f"{code}\n    import os; os.kill(os.getpid(), 9)", *arguments) as process:
            process.communicate()
            assert process.returncode == -signal.SIGKILL

    def test_a_file_that_was_half_written_is_removed_by_the_next(self, tmp_path: Path) -> None:
        """Fault 19."""
        self.leave(
            "import os, sys\nfrom pathlib import Path\n"
            "from fuseport.exporter.bundle import staging\n"
            "staging._confirm = os.fsync = lambda *_: os.kill(os.getpid(), 9)\n"
            "if True:\n    staging.write_whole(Path(sys.argv[1]), b'half')",
            tmp_path / "r.json",
        )
        assert len(list(tmp_path.iterdir())) == 1
        staging.write_whole(tmp_path / "other.json", b"{}")
        assert len(list(tmp_path.iterdir())) == 2
        staging.write_whole(tmp_path / "r.json", b"{}")
        assert {path.name for path in tmp_path.iterdir()} == {"r.json", "other.json"}

    def test_work_folders_of_killed_processes_alone_are_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault 19: a verification keeps gigabytes there."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        self.leave(
            "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
            "from fuseport.exporter.bundle.staging import work_folder\n"
            "with work_folder() as work:\n    (work / 'large').touch()",
            tmp_path,
        )
        [left] = tmp_path.iterdir()
        (tmp_path / f"{staging._WORK}mine").mkdir()
        with staging.work_folder() as one, staging.work_folder() as other:
            assert one.is_dir()
            assert other.is_dir()
            assert not left.exists()
            assert one.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in tmp_path.iterdir()] == [f"{staging._WORK}mine"]


def test_a_long_name_can_be_written_to(tmp_path: Path) -> None:
    name = "é" * 127  # 254 bytes
    staging.write_whole(tmp_path / name, b"x")
    with staged(tmp_path / f"{name[:-1]}b", force=False):
        pass
    assert len(list(tmp_path.iterdir())) == 2


class TestInterrupts:
    """Fault 21."""

    @pytest.fixture(autouse=True)
    def _raising(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        yield
        signal.signal(signal.SIGTERM, before)

    def test_a_signal_waits_for_the_end(self) -> None:
        done = []

        def run() -> None:
            with interrupts.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("rest")

        with pytest.raises(SystemExit, match="143"):
            run()
        assert done == ["rest"]
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)

    def test_where_it_is_lifted_a_signal_raises_and_what_was_begun_is_ended(self) -> None:
        done = []

        def run() -> None:
            with interrupts.deferred() as lifted:
                try:
                    with lifted():
                        os.kill(os.getpid(), signal.SIGTERM)
                        done.append("not reached")
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)
                    done.append("cleaned up")

        with pytest.raises(SystemExit, match="143"):
            run()
        assert done == ["cleaned up"]

    def test_what_is_ignored_stays_ignored(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    @pytest.mark.parametrize("step", ["_begun", "_swap_in", "_remove"])
    def test_a_signal_between_two_steps_leaves_nothing(
        self, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = getattr(staging, step)

        def interrupted(*given: object, **named: object) -> object:
            result = real(*given, **named)
            os.kill(os.getpid(), signal.SIGTERM)
            return result

        monkeypatch.setattr(staging, step, interrupted)
        with pytest.raises(SystemExit), staged(tmp_path / "b", force=True):
            pass
        with suppress(UsageError):
            open_bundle(tmp_path / "b")
        assert {path.name for path in tmp_path.iterdir()} <= {"b"}


class TestTrust:
    def test_a_record_that_cannot_be_written_is_a_storage_error_and_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault 20."""
        monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path))
        trust.add("a" * 64)
        with _file_size_limit(70), pytest.raises(StorageError, match="trusted"):
            trust.add("b" * 64)
        assert trust.is_trusted("a" * 64)
        trust.add("c" * 64)
        assert trust.is_trusted("c" * 64)
        assert not trust.is_trusted("b" * 64)

    def test_many_at_once_lose_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault 21."""
        from concurrent.futures import ThreadPoolExecutor

        monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path))
        hashes = [f"{n:064x}" for n in range(40)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(trust.add, hashes))
        assert [h for h in hashes if not trust.is_trusted(h)] == []


def test_an_archive_that_torch_cannot_write_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    """Fault 20: torch's own writer ends the process where a write fails."""
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    program = torch.export.export(Net(), (torch.zeros(3),))
    for limit in (10, 1000, 3000):
        with _file_size_limit(limit), pytest.raises(OSError, match="too large"):  # noqa: SIM117
            with sink(tmp_path / "x.pt2") as file:
                torch.export.save(program, file)
    with sink(tmp_path / "x.pt2") as file:
        torch.export.save(program, file)
    loaded = torch.export.load(tmp_path / "x.pt2").module()
    assert loaded(torch.zeros(3)).tolist() == [1, 1, 1]


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    """Files of this process can grow to so many bytes: beyond, writing fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
