"""Every way for a runtime to die × every runtime: one row tells of it, and all others stand.

Fault 14. The whole of it is `make faults`; `make test` has every death in one runtime, and every
runtime dying of something, AOTInductor's aside, which would have to be compiled first.
"""

import json
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest
import torch

from fuseport.exporter import api, runtimes
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.runtimes import RUNTIMES
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Report, Row
from fuseport.exporter.verify.rows import judged
from fuseport.exporter.verify.run import Limits, execute
from fuseport.exporter.verify.subject import Subject, prepare
from fuseport.exporter.verify.turns import waited

# A worker whose jobs end as `DEATHS` says, by their numbers, after the runtime has done them and
# before the answer is written; each leaves processes behind, one of them in a session of its own.
WORKER = """
import ctypes, faulthandler, json, mmap, os, shutil, subprocess, sys, threading, time
from contextlib import contextmanager
from pathlib import Path

import psutil
from fuseport.exporter.child.spent import OF_CHILD
from fuseport.exporter.runtimes import _worker

REQUEST = json.loads(Path(sys.argv[1]).read_text())
FOLDER = Path(REQUEST["folder"])
PLAN = json.loads(os.environ["DEATHS"])


def answer(job, content):
    _worker.write(FOLDER / f"{job['id']}.json", content)
    time.sleep(1000)


def bus(job):
    with (FOLDER / "mapped").open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        view[0]


def overflow(job):
    faulthandler._stack_overflow()


def memory(job):
    hold = []
    while True:
        hold.append(os.urandom(1) * 2**24)


def raise_it(job):
    raise RuntimeError("planted")


def empty(job):
    for path in FOLDER.iterdir():
        number = path.name.partition(".")[0]
        if number.isdigit() and number != job["id"]:
            continue  # the parent may not have read it yet
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def flood(job):
    for _ in range(10):
        os.write(1, b"}" * 2**20)
    for _ in range(80):
        os.write(2, b"x" * 2**20)


DEATHS = {
    "null pointer": lambda job: ctypes.string_at(0),
    "abort": lambda job: os.abort(),
    "division": lambda job: os.kill(os.getpid(), 8),
    "bus error": bus,
    "kill": lambda job: os.kill(os.getpid(), 9),
    "out of memory": memory,
    "exit 0": lambda job: os._exit(0),
    "exit 3": lambda job: os._exit(3),
    "exception": raise_it,
    "hang": lambda job: time.sleep(1000),
    "stack overflow": overflow,
    "unnamed signal": lambda job: os.kill(os.getpid(), 40),
    "garbage": lambda job: answer(job, {"status": ["?"], "token": REQUEST["token"]}),
    "forged": lambda job: answer(job, {"status": "done", "calls": [1], "token": "?"}),
    "no results": lambda job: answer(
        job,
        {
            "status": "done",
            "calls": [],
            "mutated": [],
            "spent": dict.fromkeys(OF_CHILD, 0),
            "token": REQUEST["token"],
        },
    ),
    "named pipe": lambda job: (os.mkfifo(FOLDER / f"{job['id']}.json"), time.sleep(1000)),
    "torn results": lambda job: os.truncate(FOLDER / f"{job['id']}.1.safetensors", 20),
    "no files": empty,
    "flood": flood,
    "children": lambda job: None,
}


def end(process, number):
    process.send_signal(number)
    process.resume()


@contextmanager
def around(job):
    what = PLAN.get(job["id"], "")
    if what.startswith("host "):
        for process in psutil.Process().children():
            process.suspend()
            threading.Timer(0.5, end, (process, int(what.split()[1]))).start()
    yield
    if what in DEATHS:
        quiet = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
        for apart in (False, True):
            subprocess.Popen(["sleep", "1000"], start_new_session=apart, **quiet)
        DEATHS[what](job)


_worker.main(sys.argv[1], around)
"""


@dataclass(frozen=True)
class End:
    """What a row says of a death.

    Attributes:
        reason: a pattern that its beginning has.
        crash: whether the process is known to be gone, or not to be believed.
    """

    reason: str
    crash: bool = True


DEATHS = {
    "null pointer": End("killed by SIGSEGV$"),
    "abort": End("killed by SIGABRT$"),
    "division": End("killed by SIGFPE$"),
    "bus error": End("killed by SIGBUS$"),
    "kill": End("killed by SIGKILL$"),
    "out of memory": End(r"stopped at more than \d+ MiB of memory$"),
    "exit 0": End("ended with code 0 before its answer$"),
    "exit 3": End("ended with code 3 before its answer"),
    "exception": End("ended with code 1 before its answer: RuntimeError: planted$"),
    "hang": End(r"stopped after \d+ s without an answer$"),
    "stack overflow": End("killed by SIGSEGV$"),
    "unnamed signal": End("killed by signal 40$"),
    "garbage": End("its answer cannot be read: "),
    "forged": End("an answer that is not the child's own$"),
    "no results": End("its answer cannot be read: ValueError: it has no results$"),
    "named pipe": End(r"its answer cannot be read: ValueError: \d+\.json is no plain file"),
    "torn results": End("its results cannot be read: ", crash=False),
    "no files": End("its answer cannot be read: FileNotFoundError: "),
}

# Of the process without Python that some runtimes have: the next job has a new one.
HOSTS = {
    f"host {number}": End(f".*: the C\\+\\+ host was killed by {name}$", crash=False)
    for number, name in {11: "SIGSEGV", 6: "SIGABRT", 9: "SIGKILL"}.items()
}

# No death, but what could be taken for one, or could outlive its parent.
HARMLESS = ("flood", "children")

COMPILED = ("aot_inductor", "aot_inductor_cpp")

NET = """
import torch
from fuseport import ops

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(6, 5)
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        return ops.rms_norm(self.one(x), self.scale)
"""


def subject_of(folder: Path, formats: Sequence[str]) -> Subject:
    """A net with a fused op, exported, and its truth."""
    code = folder / "dying_net.py"
    code.write_text(NET)
    torch.manual_seed(0)
    state = {"one.weight": torch.randn(5, 6), "one.bias": torch.randn(5), "scale": torch.ones(5)}
    torch.save(state, folder / "net.pt")
    model = f"{code}:Net"
    inputs = parse_inputs(["x:[batch,6]"])
    bundle = api.export(
        folder / "net.pt", folder / "bundle", model=model, inputs=inputs, format=formats
    )
    (folder / "work").mkdir()
    return prepare(open_bundle(bundle.folder), model, folder / "work", lambda _: None)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """All formats but those that take minutes to compile."""
    formats = ["torchscript", "exported_program", "onnx", "onnx_native"]
    return subject_of(tmp_path_factory.mktemp("deaths"), formats)


@pytest.fixture(scope="module")
def whole_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """All formats."""
    formats = ["torchscript", "exported_program", "onnx", "onnx_native", "aot_inductor"]
    return subject_of(tmp_path_factory.mktemp("deaths"), formats)


class Trial:
    """A runtime whose jobs, in turns, are done and die of one thing after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "path").mkdir()
        (folder / "path" / "dying_worker.py").write_text(WORKER)
        path = f"{folder / 'path'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", path)
        self._setenv = monkeypatch.setenv
        self._mark = uuid.uuid4().hex
        monkeypatch.setenv("DEATHS_OF", self._mark)

    def run(
        self, subject: Subject, runtime: str, ends: Sequence[str]
    ) -> tuple[dict[int, list[Row]], list[Job], dict[int, str]]:
        """The rows of each job by its number, the jobs, and by number what each was to die of."""
        jobs = list(islice(cycle(subject.jobs(runtime, None, None)), 2 * len(ends)))
        plan = {2 * i + 1: end for i, end in enumerate(ends)}
        # The kinds of forms have rows of their own, which are not named after tensors.
        forms = {i for i in plan if jobs[i].way.endswith("forms")}
        plain = next(job for job in jobs if not job.way.endswith("forms"))
        jobs = [plain if i in forms else job for i, job in enumerate(jobs)]
        self._setenv("DEATHS", json.dumps({str(i): end for i, end in plan.items()}))
        rows: dict[int, list[Row]] = {}
        work = self.folder / runtime
        work.mkdir()
        answers = execute(
            jobs,
            subject.samples,
            lambda _: subject.programs,
            work,
            self._limits(subject, jobs[:1], ends),
            worker="dying_worker",
        )
        for number, answer in enumerate(waited(answers)):  # whose files are gone with the next one
            assert answer.job == jobs[number]
            sample = subject.samples[answer.job.case]
            program = subject.programs[sample.case.entry]
            rows[number] = list(judged(answer, sample, program, None))
        assert len(rows) == len(jobs)
        return rows, jobs, plan

    def left(self) -> list[psutil.Process]:
        """Processes of a trial that are still there, though not only until they next run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("DEATHS_OF") == self._mark:
                    found.append(process)
            except psutil.Error:
                continue  # it has ended, or is another user's
        _, alive = psutil.wait_procs(found, timeout=10)
        return alive

    def _limits(self, subject: Subject, jobs: Sequence[Job], ends: Sequence[str]) -> Limits:
        """Of memory; and of time where that matters, by how long a job takes that does not hang."""
        seconds = 900.0
        if "hang" in ends:
            work = self.folder / f"{jobs[0].runtime}, timed"
            work.mkdir()
            begin = time.monotonic()
            told = subject.programs
            list(waited(execute(jobs, subject.samples, lambda _: told, work, Limits(seconds))))
            seconds = max(20.0, round(5 * (time.monotonic() - begin)))
        return Limits(seconds, 3 * 2**30)


def hold(subject: Subject, trial: Trial, runtime: str, ends: Sequence[str]) -> None:
    """One row for each death that says what it was; all others as if nothing had been; exit 6."""
    rows, jobs, plan = trial.run(subject, runtime, ends)
    known: Mapping[str, End] = {**DEATHS, **HOSTS}
    for number, job in enumerate(jobs):
        found, what = rows[number], plan.get(number, "")
        if what in known:
            (row,) = found
            assert (row.verdict, row.tensor, row.crash) == ("error", "*", known[what].crash), row
            assert re.match(known[what].reason, str(row.reason)), (what, row.reason)
            continue
        wrong = [(row.tensor, row.verdict, row.reason) for row in found if row.verdict != "pass"]
        assert found, job
        assert not wrong, (what, job.case, wrong)
        if not job.way.endswith("forms"):
            names = {spec["name"] for spec in subject.programs[job.program]["outputs"]}
            assert {row.tensor for row in found} == names
    report = Report("b", "", {}, 0.0, tuple(row for found in rows.values() for row in found))
    assert report.exit_code() == (6 if set(ends) & set(known) else 0)
    assert not trial.left()


def ends_of(runtime: str) -> tuple[str, ...]:
    """All that can befall a runtime."""
    hosted = hasattr(runtimes.get(runtime), "_host")
    return (*DEATHS, *HARMLESS, *(HOSTS if hosted else ()))


def sampled() -> dict[str, list[str]]:
    """Every death once, dealt out to runtimes that need no compiler of minutes."""
    dealt: dict[str, list[str]] = {name: [] for name in RUNTIMES if name not in COMPILED}
    for end, name in zip((*DEATHS, *HARMLESS), cycle(dealt), strict=False):
        dealt[name].append(end)
    dealt["libtorch"].append("host 11")
    return dealt


@pytest.mark.parametrize("runtime", sampled())
def test_a_death_is_one_row_and_leaves_nothing(
    subject: Subject,
    runtime: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Fault 14."""
    if runtime == "onnxruntime+fused":
        request.getfixturevalue("fused_library")
    hold(subject, Trial(tmp_path, monkeypatch), runtime, sampled()[runtime])


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_death_in_every_runtime(
    whole_subject: Subject,
    runtime: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Fault 14, the whole of it."""
    if runtime == "onnxruntime+fused":
        request.getfixturevalue("fused_library")
    hold(whole_subject, Trial(tmp_path, monkeypatch), runtime, ends_of(runtime))
