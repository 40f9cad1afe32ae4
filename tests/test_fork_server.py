"""Children that are forked are as those that are started: see also test_run, which has both."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fuseport.exporter.child import Child, Limits, fork_server
from fuseport.exporter.child.fork_server import MARK, PARENT
from fuseport.exporter.verify.run import quick_starts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

# What a child is told by the process that starts it, and what it is of the system's.
TELLING = """
import json, os, sys, time
from pathlib import Path

file = Path(sys.argv[1])
about = {
    "name": __name__,
    "arguments": sys.argv[1:],
    "path": sys.path[0],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "session": os.getsid(0) == os.getpid(),
    "signals": str(__import__("signal").getsignal(2)),
    "input": sys.stdin.readline(),
    "open": sorted(int(n) for n in os.listdir("/proc/self/fd")),
    "threads": len(os.listdir("/proc/self/task")),
    "torch": "torch" in sys.modules,
    "parent": os.getppid(),
}
print("printed", file=sys.stderr, flush=True)
file.with_suffix(".part").write_text(json.dumps(about))
file.with_suffix(".part").rename(file)
sys.stdin.readline()
if "fail" in sys.argv:
    raise ValueError("the child's own")
if "exit" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def telling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `telling`, in which processes are started."""
    (tmp_path / "telling.py").write_text(TELLING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def child(folder: Path, *more: str) -> Iterator[tuple[Child, dict[str, object]]]:
    """A child that has told about itself, and waits."""
    file = folder / "about.json"
    file.unlink(missing_ok=True)
    with Child(["telling", str(file), *more], folder / "errors", Limits(60.0)) as found:
        found.expect(True)
        found.tell("said\n")
        while not file.exists():
            assert not found.ended(), found.last_words()
            time.sleep(0.01)
        yield found, json.loads(file.read_text())


def test_a_forked_child_is_as_a_started_one(telling: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPORT_GONE", "before")
    with quick_starts(wanted=False), child(telling, "x") as (_, started):
        pass
    with quick_starts():
        # Of our own variables it has those of now.
        monkeypatch.setenv("FUSEPORT_NEW", "now")
        monkeypatch.delenv("FUSEPORT_GONE")
        with child(telling, "x") as (_, forked):
            pass
    assert (started.pop("torch"), forked.pop("torch")) == (False, True)
    assert started.pop("threads") == forked.pop("threads") == 1
    parents = started.pop("parent"), forked.pop("parent")
    assert parents[0] == os.getpid() != parents[1]
    before, after = started.pop("environment"), forked.pop("environment")
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert (before.pop(PARENT), after.pop(PARENT)) == tuple(map(str, parents))
    assert len(before.pop(MARK)) == len(after.pop(MARK))
    assert before.pop("FUSEPORT_GONE") == "before"
    assert after.pop("FUSEPORT_NEW") == "now"
    for name in ("PYTEST_CURRENT_TEST", "OLDPWD"):
        before.pop(name, None), after.pop(name, None)
    assert {k: v for k, v in after.items() if before.get(k) != v} == {}
    assert set(before) <= set(after)
    assert started == forked
    assert forked["name"] == "__main__"
    assert forked["input"] == "said\n"
    assert forked["path"] == forked["folder"] == str(telling)


def test_how_it_ended_is_known(telling: Path) -> None:
    words = {
        "": "ended with code 0 before its answer",
        "exit": "ended with code 7 before its answer: printed",
        "fail": "ended with code 1 before its answer: ValueError: the child's own",
    }
    with quick_starts():
        for forked in (True, False):
            for how, said in words.items():
                with quick_starts(wanted=forked), child(telling, how) as (running, about):
                    assert (about["parent"] == os.getpid()) != forked
                    running.tell("go on\n")
                    while not running.ended():
                        time.sleep(0.01)
                    assert running.last_words() == said


def test_other_circumstances_are_no_server_s(
    telling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries read the environment as they are loaded, which they are in the server."""
    with quick_starts():
        outer = fork_server.current()
        assert outer is not None
        monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "") + "1")
        assert fork_server.current() is None
        with child(telling) as (_, about):
            assert about["parent"] == os.getpid()
        with quick_starts(), child(telling) as (_, about):
            assert about["parent"] != os.getpid()
            assert fork_server.current() is not outer
        with quick_starts(wanted=False):
            assert fork_server.current() is None
        monkeypatch.undo()


def test_one_within_another_is_the_same(telling: Path) -> None:
    with quick_starts():
        outer = fork_server.current()
        with quick_starts():
            assert fork_server.current() is outer
        assert fork_server.current() is outer
        with quick_starts(wanted=False):
            assert fork_server.current() is None


def test_a_context_that_ends_leaves_those_around_it(telling: Path) -> None:
    with quick_starts(wanted=False), quick_starts():
        server = fork_server.current()
        assert server is not None
        with quick_starts(wanted=False):
            assert fork_server.current() is None
        assert fork_server.current() is server
    assert fork_server.current() is not server


def test_a_dead_server_costs_what_it_forked_and_no_more(telling: Path) -> None:
    with quick_starts():
        with child(telling) as (running, about):
            psutil.Process(int(str(about["parent"]))).kill()
            while not running.ended():
                time.sleep(0.01)
            assert running.last_words() == "killed by SIGKILL"
        with child(telling) as (_, about):
            assert about["parent"] == os.getpid()


def test_what_was_forked_ends_with_the_server(telling: Path) -> None:
    with quick_starts(), child(telling) as (running, about):
        server = psutil.Process(int(str(about["parent"])))
        (pid,) = (process.pid for process in server.children())
    assert running.ended()
    assert not server.is_running()
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.01)  # what was the server's is for another process to reap
    assert not psutil.pid_exists(pid)


def test_several_are_forked_beside_each_other(tmp_path: Path, telling: Path) -> None:
    with quick_starts():
        folders = [tmp_path / str(i) for i in range(3)]
        for folder in folders:
            folder.mkdir()
        with (
            child(folders[0]) as (one, first),
            child(folders[1], "exit") as (two, second),
            child(folders[2]) as (three, third),
        ):
            assert first["parent"] == second["parent"] == third["parent"] != os.getpid()
            two.tell("go on\n")
            while not two.ended():
                time.sleep(0.01)
            assert not one.ended()
            assert not three.ended()
            assert two.last_words() == "ended with code 7 before its answer: printed"
