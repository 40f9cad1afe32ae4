"""Runtimes that run at once: what they give, when each is looked at, and what ends them."""

import json
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import psutil
import pytest

from fuseport.exporter import api
from fuseport.exporter.child import Child, Limits
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify import turns
from fuseport.exporter.verify.turns import in_turns, waited

Small = tuple[Path, str]

# Touches the files that it is told, one a line, after so many seconds each.
TOUCHING = """
import sys, time
from pathlib import Path
for seconds, file in zip(sys.argv[1::2], sys.argv[2::2]):
    time.sleep(float(seconds))
    Path(file).touch()
sys.stdin.read()
"""


class Tasks:
    """Tasks that tell how many of them run at a time."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.most = 0
        self.order: list[str] = []

    def task(self, name: str, looks: int, fails: bool = False) -> Generator[str | None, None, None]:
        self.running.add(name)
        self.order.append(name)
        self.most = max(self.most, len(self.running))
        try:
            for number in range(3):
                for _ in range(looks):
                    yield None
                yield f"{name}{number}"
            if fails:
                raise OSError("no room")
        finally:
            self.running.discard(name)


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_results_are_of_their_task_whoever_gives_first(at_once: int) -> None:
    tasks = Tasks()
    looks = {"a": 5, "b": 0, "c": 2, "d": 9}
    found = in_turns({n: partial(tasks.task, n, k) for n, k in looks.items()}, at_once)
    assert found == {name: [f"{name}{number}" for number in range(3)] for name in looks}
    assert list(found) == list(looks)
    assert tasks.order == list(looks)
    assert (tasks.most, tasks.running) == (min(at_once, 4), set())


def test_what_raises_ends_the_others() -> None:
    tasks = Tasks()
    names = {"a": False, "b": True, "c": False}
    looks = {"a": 100, "b": 0, "c": 0}
    with pytest.raises(OSError, match="no room") as caught:
        in_turns({n: partial(tasks.task, n, looks[n], fails) for n, fails in names.items()}, 2)
    assert tasks.running == set()  # while the error holds on to all that it came through
    assert caught.value.__traceback__ is not None
    assert tasks.order == ["a", "b"]


def test_nothing_is_nothing() -> None:
    assert in_turns({}, 2) == {}


def test_one_that_is_waited_for_is_closed_with_who_waits() -> None:
    tasks = Tasks()
    assert list(waited(tasks.task("a", 2))) == ["a0", "a1", "a2"]
    early = waited(tasks.task("b", 1))
    assert next(early) == "b0"
    assert tasks.running == {"b"}
    early.close()
    assert tasks.running == set()


def test_there_is_room_for_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= turns.room() <= 4
    monkeypatch.setattr(turns, "_processors", lambda: 8)
    for free, had, room in ((64, 1, 4), (6, 1, 3), (6, 4, 1), (1, 8, 1)):
        monkeypatch.setattr(turns, "_free", lambda free=free: free * 2**30)
        monkeypatch.setattr(turns, "_had", lambda had=had: had * 2**30)
        assert turns.room() == room


def test_a_container_has_less_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_CONTAINER", tmp_path)
    available = psutil.virtual_memory().available
    assert turns._free() == pytest.approx(available, rel=0.2)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{900 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\nfile {500 * 2**20}\n")
    assert turns._free() == pytest.approx(available, rel=0.2)
    (tmp_path / "memory.max").write_text(f"{1000 * 2**20}\n")
    assert turns._free() == 600 * 2**20


def test_a_report_is_the_same_however_many_run_at_once(small_bundle: Small, tmp_path: Path) -> None:
    folder, model = small_bundle
    reports = [api.verify(folder, model=model, jobs=jobs) for jobs in (1, 3)]
    alone, together = (list(report.results) for report in reports)
    assert len(alone) > 50
    assert alone == together
    indices = []
    for jobs in (1, 3):
        saved = tmp_path / str(jobs)
        api.verify(folder, model=model, jobs=jobs, save_outputs=saved)
        answers = json.loads((saved / "outputs.json").read_text())["answers"]
        indices.append([{k: v for k, v in each.items() if k != "files"} for each in answers])
    assert indices[0] == indices[1]
    with pytest.raises(UsageError, match="one runtime at least"):
        api.verify(folder, model=model, jobs=0)


class TestTheClock:
    """A child has time for each stage of a job; whoever waits for it may be at another's."""

    def child(self, folder: Path, *told: str) -> Child:
        (folder / "touching.py").write_text(TOUCHING)
        return Child(["touching", *told], folder / "errors", Limits(3.0), forked=False)

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_what_is_done_in_time_is_not_late(self, tmp_path: Path) -> None:
        begun, done = tmp_path / "begun", tmp_path / "done"
        with self.child(tmp_path, "2", str(begun), "2", str(done)) as child:
            child.expect(True, [begun, done])
            time.sleep(8)
            assert done.exists()
            assert not child.ended()

    def test_what_hangs_is_stopped_without_a_look(self, tmp_path: Path) -> None:
        begun, done = tmp_path / "begun", tmp_path / "done"
        with self.child(tmp_path, "0", str(begun), "60", str(done)) as child:
            child.expect(True, [begun, done])
            time.sleep(6)
            assert child.ended()
            assert "stopped after 3 s" in child.last_words()
