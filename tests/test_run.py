"""Runtimes in children: whatever one does, it costs its own row, and leaves nothing behind.

Fault 14; test_deaths has every death in every runtime.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from fuseport.exporter import checkpoint, models
from fuseport.exporter.child.spent import OF_CHILD
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify import truth
from fuseport.exporter.verify.plan import Case, Job
from fuseport.exporter.verify.run import Answer, Limits, execute, quick_starts
from fuseport.exporter.verify.turns import waited

# A user's model that behaves well in the parent, where truth is computed, and in a child as the
# environment says, at the lengths it says: "SIGSEGV@2,exit0@4".
NET = """
import ctypes, json, os, signal, subprocess, sys, time
from pathlib import Path
import torch

WORKER = "_worker" in sys.argv[0]
PLAN = dict(item.split("@")[::-1] for item in os.environ.get("BEHAVE", "").split(",") if item)
if WORKER and "load" in PLAN:
    os.kill(os.getpid(), signal.SIGSEGV)


def misbehave(what, net, x):
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
        time.sleep(60)
    elif what.startswith("exit"):
        os._exit(int(what[4:]))
    elif what == "raise":
        raise RuntimeError("first line\\nsecond line")
    elif what == "hang":
        time.sleep(1000)
    elif what == "memory":
        hold = [bytearray(os.urandom(1) * 2**20) for _ in range(4096)]
    elif what == "null":
        ctypes.string_at(0)
    elif what == "noise":
        print("x" * 10**6)
        os.write(1, b"}" * 10**6)
        sys.stdin.read()
    elif what == "children":
        for session in (False, True):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=session)
            with open(os.environ["PIDS"], "a") as file:
                print(child.pid, file=file)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "fork":  # a family that no parent and no group holds together
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(os.environ["PIDS"], "a") as file:
                    print(os.getpid(), file=file)
                time.sleep(1000)
            os._exit(0)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "third" and net.calls == 3:
        return x + 1
    elif what == "nan" and net.calls == 3:
        return x * float("nan")
    elif what == "mutate":
        x.add_(1)
    elif what == "forge":
        request = json.loads(Path(sys.argv[1]).read_text())
        done = {"status": "done", "calls": [], "mutated": [], "token": "?"}
        for job in request["jobs"]:
            if not Path(request["folder"], job["id"] + ".json").exists():
                Path(request["folder"], job["id"] + ".json").write_text(json.dumps(done))
                break
        time.sleep(1000)
    elif what == "garbage":
        request = json.loads(Path(sys.argv[1]).read_text())
        Path(request["folder"], request["jobs"][0]["id"] + ".json").write_text("{garbage")
        time.sleep(1000)
    return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        what = PLAN.get(str(x.shape[0]))
        if WORKER and what:
            x = misbehave(what, self, x)
        return x * self.w
"""

Run = Callable[..., list[Answer]]
QUIET = Limits(seconds=120.0)


class Setting:
    """Jobs on the model above, one for each length."""

    def __init__(self, folder: Path, lengths: Sequence[int]) -> None:
        code = folder / "net.py"
        code.write_text(NET)
        torch.save({"w": torch.tensor([1.0, 2.0, 3.0])}, folder / "w.pt")
        spec = TensorSpec("x", "float32", ("length", 3))
        model, _ = models.from_checkpoint(
            checkpoint.load(folder / "w.pt"), code=f"{code}:Net", inputs=(spec,)
        )
        (folder / "truth").mkdir()
        cases = [Case(str(length), {"length": length}, "contiguous", 0) for length in lengths]
        samples = truth.compute(model, cases, folder / "truth")
        self.samples = {sample.case.name: sample for sample in samples}
        weights = folder / "weights.safetensors"
        save_file(dict(model.module.state_dict()), weights)
        self.jobs = [Job("eager", weights, "forward", "run", str(n)) for n in lengths]
        output = TensorSpec("output", "float32", ("length", 3))
        forward = {
            "inputs": [asdict(spec)],
            "outputs": [asdict(output)],
            "architecture": {"name": "user", "config": dict(model.config)},
            "code": f"{code}:Net",
        }
        self.programs: dict[str, dict[str, Any]] = {"forward": forward}
        self.folder = folder / "run"
        self.folder.mkdir()

    def run(self, limits: Limits = QUIET, *, forked: bool = True) -> Iterator[Answer]:
        """Answers of children that are forked from a server with the environment as it is now."""
        with quick_starts(wanted=forked):
            told = self.programs
            answers = execute(self.jobs, self.samples, lambda _: told, self.folder, limits)
            yield from waited(answers)


BOTH = pytest.mark.parametrize("forked", [True, False], ids=["forked", "started"])


def states(answers: Sequence[Answer]) -> list[str]:
    return [answer.status for answer in answers]


_others: set[int] = set()  # children of this process before a test: other tests' pools


@pytest.fixture(autouse=True)
def _children_of_before() -> None:
    _others.clear()
    _others.update(child.pid for child in psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    """The processes that a test has started, and theirs."""
    return [c for c in psutil.Process().children(recursive=True) if c.pid not in _others]


def workers() -> list[psutil.Process]:
    """Those of them that run an artifact: all but the server that forks them."""
    return [
        child
        for child in children()
        if child.ppid() != os.getpid() or not any("_fork_server" in a for a in child.cmdline())
    ]


def gone(pid: int, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@BOTH
def test_a_death_costs_its_own_row(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = {
        2: ("SIGSEGV", "killed by SIGSEGV"),
        3: ("exit0", "ended with code 0 before its answer"),
        5: ("SIGKILL", "killed by SIGKILL"),
        6: ("null", "killed by SIGSEGV"),
        8: ("exit3", "ended with code 3 before its answer"),
    }
    plan = ",".join(f"{what}@{length}" for length, (what, _) in deaths.items())
    monkeypatch.setenv("BEHAVE", plan)
    setting = Setting(tmp_path, range(1, 10))
    answers = list(setting.run(forked=forked))
    assert [answer.job for answer in answers] == setting.jobs
    for answer in answers:
        length = int(answer.job.case)
        if length in deaths:
            assert answer.status == "crash"
            assert str(answer.reason).startswith(deaths[length][1])
        else:
            assert answer.status == "done"
    assert not children()


def test_what_is_no_death_is_one_row_of_a_living_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", "raise@1,noise@2,third@3,nan@4,mutate@5")
    setting = Setting(tmp_path, range(1, 7))
    found: dict[str, Any] = {}
    with closing(setting.run()) as answers:
        pids = set()
        for answer in answers:
            pids |= {child.pid for child in workers()}
            calls = {c: dict(answer.tensors(c)) for c in answer.calls or {}}
            found[answer.job.case] = (answer, calls)
            # Two answers may be there and one be written; no more, however many jobs there are.
            assert len({p.name.split(".")[0] for p in setting.folder.glob("*.safetensors")}) <= 3
    assert len(pids) == 1
    answer, _ = found["1"]
    assert (answer.status, answer.reason) == ("error", "call 1 failed: RuntimeError: first line")
    answer, calls = found["2"]
    assert (answer.status, list(calls)) == ("done", [1])
    # The counter runs on through the lengths: nine calls and no third one but here.
    for case in ("3", "4"):
        assert found[case][0].status == "done"
    answer, calls = found["5"]
    assert answer.mutated == ("x",)
    assert list(calls) == [1, 2, 3]
    answer, calls = found["6"]
    assert (list(calls), answer.mutated) == ([1], ())
    assert not list(setting.folder.glob("*.safetensors"))


def test_an_answer_says_where_the_child_s_time_went(tmp_path: Path) -> None:
    first, second = Setting(tmp_path, [1, 2]).run()
    assert first.spent["loading"] > 0.1, "Python, torch and the artifact"
    assert second.spent["loading"] == 0.0, "is loaded already"
    for answer in (first, second):
        assert set(answer.spent) == set(OF_CHILD)
        assert answer.spent["running"] > 0.0
        assert answer.spent["comparing"] > 0.0


HELD = """
import resource, sys, tempfile, torch
from pathlib import Path
from safetensors.torch import save_file
from fuseport.exporter.runtimes._worker import _run
from fuseport.exporter.child.spent import Spent

class Session:
    def run(self, inputs):
        return {str(i): torch.ones(2**20, 16) for i in range(int(sys.argv[1]))}  # 64 MiB each

with tempfile.TemporaryDirectory() as folder:
    save_file({"input/x": torch.ones(1)}, f"{folder}/x")
    job = {"id": "0", "way": "run", "tensors": f"{folder}/x", "layout": "contiguous",
           "inputs": ["x"], "cotangents": [], "repeats": 3}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = _run(Session(), job, Path(folder), Spent())
    assert answer["calls"] == [1], answer
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the most memory is told in other units there")
def test_a_child_holds_what_it_hands_back_twice_at_most() -> None:
    """What the runtime gave, and the pages of the file that it is held against."""
    for count in (1, 4):
        done = subprocess.run(
            [sys.executable, "-c", HELD, str(count)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < (2 * count + 0.5) * 64 * 1024, "KiB"


@pytest.mark.parametrize("what", ["third", "nan"])
def test_a_third_call_that_differs_is_handed_back(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", f"{what}@2")
    ((calls, tensors),) = [
        (list(answer.calls or {}), [dict(answer.tensors(c)) for c in answer.calls or {}])
        for answer in Setting(tmp_path, [2]).run()
    ]
    assert calls == [1, 3]
    assert not torch.equal(tensors[0]["output"], tensors[1]["output"])


def test_a_hang_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHAVE", "hang@2")
    answers = list(Setting(tmp_path, [1, 2, 3]).run(Limits(seconds=15.0)))
    assert states(answers) == ["done", "crash", "done"]
    assert answers[1].reason == "stopped after 15 s without an answer"


def test_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHAVE", "memory@2")
    answers = list(Setting(tmp_path, [1, 2, 3]).run(Limits(120.0, 1536 * 2**20)))
    assert states(answers) == ["done", "crash", "done"]
    assert answers[1].reason == "stopped at more than 1536 MiB of memory"


def test_a_death_while_loading_is_not_tried_again_for_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", "x@load")
    begin = time.monotonic()
    answers = list(Setting(tmp_path, range(1, 20)).run())
    assert states(answers) == ["crash"] * 19
    assert time.monotonic() - begin < 60


def test_a_child_that_cannot_start_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(tmp_path, range(1, 20))
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import os; os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    answers = list(setting.run())
    assert states(answers) == ["crash"] * 19
    assert str(answers[0].reason).startswith("ended with code 9")


@BOTH
@pytest.mark.parametrize(("what", "count"), [("children", 2), ("fork", 1)])
def test_the_whole_process_tree_ends(
    what: str, count: int, forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", f"{what}@2")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    assert states(list(Setting(tmp_path, [2, 3]).run(forked=forked))) == ["crash", "done"]
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == count
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("forge", "crash", "an answer that is not the child's own"),
        ("garbage", "crash", "its answer cannot be read"),
    ],
)
def test_an_answer_counts_only_with_its_token(
    what: str, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", f"{what}@2")
    with closing(Setting(tmp_path, [2]).run()) as answers:
        (answer,) = answers
    assert answer.status == status
    assert str(answer.reason).startswith(reason)
    assert not children()


def test_closing_early_ends_the_child(tmp_path: Path) -> None:
    answers = Setting(tmp_path, range(1, 10)).run()
    assert next(answers).status == "done"
    child, *_ = workers()
    answers.close()  # type: ignore[attr-defined]
    assert gone(child.pid)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGINT", "SIGKILL"],
)
def test_when_the_parent_ends_nothing_stays(
    number: signal.Signals, code: int, state_spaces_bundle: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "fuseport.cli", "verify", str(state_spaces_bundle)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.DEVNULL,
        # What a shell runs in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        parent = psutil.Process(process.pid)
        while not (children := parent.children()):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(1.0)
        process.send_signal(number)
        ended = process.wait(timeout=30)
    assert ended == code
    assert all(gone(child.pid) for child in children)
    if number is not signal.SIGKILL:  # nobody is left then to take the folder away
        assert not list(tmp_path.glob("fuseport-*"))
