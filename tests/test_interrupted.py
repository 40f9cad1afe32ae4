"""Signals at many moments of real commands, and what real exports leave or give.

`FUSEPORT_MOMENTS=40` tries so many moments of each; `make faults` does.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fuseport.exporter.bundle import hash_file, open_bundle
from fuseport.exporter.bundle.trust import is_trusted

MOMENTS = int(os.environ.get("FUSEPORT_MOMENTS", "4"))
MARK = "FUSEPORT_TEST_MARK"
Small = tuple[Path, str]

# Forks commands from a process that has imported all that they need.
SERVER = """
import json, os, resource, signal, sys, tempfile
import onnxscript, torch
from fuseport.cli import main
from fuseport.exporter import api, formats

formats.default()

def be(request):
    # What a shell runs in the background ignores SIGINT, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    torch.set_num_threads(1)  # a team of threads does not outlast a fork
    errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], resource.RLIM_INFINITY))
    try:
        main(request["arguments"])
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        code = 130
    os._exit(code)

for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    elif not (answer := os.fork()):
        be(request)
    print(answer, flush=True)
"""


@dataclass(frozen=True)
class Run:
    """A command at work."""

    pid: int
    errors: Path
    ask: Callable[..., int]

    def said(self) -> list[str]:
        return self.errors.read_text().splitlines()

    def wait(self) -> int:
        """The exit code, once there is one."""
        return self.ask(wait=self.pid)


Command = Callable[..., Run]


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., int]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def ask(**request: object) -> int:
            requests.write(f"{json.dumps(request)}\n")
            requests.flush()
            return int(answers.readline())

        yield ask
        requests.close()


@pytest.fixture
def command(ask: Callable[..., int], tmp_path: Path) -> Command:
    """Starts fuseport with a temporary folder of its own, `tmp_path / "tmp"`."""
    (tmp_path / "tmp").mkdir()

    def start(*arguments: object, limit: int | None = None, **environment: str) -> Run:
        errors = tmp_path / f"errors-{uuid.uuid4()}"
        errors.touch()
        pid = ask(
            arguments=[str(argument) for argument in arguments],
            environment={"TMPDIR": str(tmp_path / "tmp"), **environment},
            errors=str(errors),
            limit=limit,
        )
        return Run(pid, errors, ask)

    return start


def export_of(small: Small, output: Path) -> list[object]:
    folder = small[0].parent
    options = ["--model", small[1], "--input-shapes", "x:[batch,6]"]
    return ["export", folder / "small.pt", "-o", output, *options]


def left_in(folder: Path) -> list[str]:
    # torch's own cache is shared by all processes of a user, and outlives them.
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def running(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue  # it has ended, or is none of ours
    return found


@pytest.mark.parametrize("what", ["export", "verify"])
def test_a_signal_at_any_moment_leaves_nothing_behind(
    what: str, command: Command, small_bundle: Small, tmp_path: Path
) -> None:
    """Fault 21. Moments are drawn from each part of the time that the command takes."""
    output = tmp_path / "out" / "b"
    output.parent.mkdir()
    bundle, model = small_bundle
    arguments = {
        "export": export_of(small_bundle, output),
        "verify": ["verify", bundle, "--model", model, "--runtime", "onnxruntime"],
    }[what]
    begin = time.monotonic()
    run = command(*arguments)
    assert run.wait() == 0, run.said()
    seconds = time.monotonic() - begin
    before = list(output.parent.iterdir())
    generator = random.Random(0)
    for moment in range(MOMENTS):
        number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
        wait = seconds * (moment + generator.random()) / MOMENTS
        mark = str(uuid.uuid4())
        force = ["--force"] if what == "export" else []
        run = command(*arguments, *force, **{MARK: mark})
        time.sleep(wait)
        os.kill(run.pid, number)
        code = run.wait()
        said = f"{what}, {number.name} after {wait} s: {code}, {run.said()}"
        assert code in (128 + number, 0), said
        if code:
            assert run.said()[-1:] in (["fuseport: interrupted"], []), said
        assert running(mark) == [], said
        assert left_in(tmp_path / "tmp") == [], said
        assert list(output.parent.iterdir()) == before, said
        if what == "export":
            open_bundle(output)


def test_a_signal_before_the_command_has_begun_is_no_verdict() -> None:
    """Fault 21: Python, or click, would end with 1, which means a mismatch."""
    # Interrupted in the middle of its own start, before any code of ours, Python ends with 1.
    code = (
        "import runpy, sys; print(flush=True); sys.argv = ['fuseport', 'doctor']\n"
        "runpy.run_module('fuseport.cli', run_name='__main__')"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as run:
            assert run.stdout is not None
            run.stdout.readline()
            run.send_signal(number)
        # Before there is a handler, the signal itself ends the process: 130 or 143 to a shell.
        assert run.returncode in (-number, 128 + number)


LOSES = """
import os, signal, time

class Finalizer:
    def __del__(self):
        os.kill(os.getpid(), signal.{number})

def finalizer():
    Finalizer()

def handler():
    try:
        os.kill(os.getpid(), signal.{number})
        time.sleep(1)
    except:
        return

def replaced():
    handler()
    raise ValueError("of C++, which knows nothing of the first")

def wrapped():
    class Named:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), signal.{number})
            time.sleep(1)

    class Owner:
        named = Named()

def command():
    {where}()
    {after}
"""


@pytest.mark.parametrize("after", ["time.sleep(30)", "return"])
@pytest.mark.parametrize("where", ["finalizer", "handler", "replaced", "wrapped"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_that_other_code_loses_ends_the_command_all_the_same(
    number: signal.Signals, where: str, after: str
) -> None:
    """Python drops what a finalizer raises, and a bare `except` of a library all there is."""
    code = (
        LOSES.format(number=number.name, where=where, after=after)
        + "import click; from fuseport.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main.add_command(click.Command('x', callback=command))\n"
        "main(['x'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=25, stderr=subprocess.PIPE, text=True
    )
    assert run.returncode == 128 + number, run.stderr
    assert "a bug in fuseport" not in run.stderr


def test_a_lost_signal_does_not_disturb_what_cleans_up() -> None:
    """While the first one is on its way out, it is not raised again."""
    code = """
import os, signal, time, click
from fuseport.cli import main

def generator():
    try:
        yield
    finally:
        time.sleep(1.5)
        print("closed")

def command():
    begun = generator()
    next(begun)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    finally:
        try:
            int("")
        except ValueError:
            time.sleep(1.5)
        print("cleaned")

main.add_command(click.Command("x", callback=command))
main(["x"])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=25, capture_output=True, text=True
    )
    assert run.returncode == 143, run.stderr
    assert run.stdout.split() == ["cleaned", "closed"]


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As in what a shell without job control runs in the background."""
    code = (
        "import os, signal, click; from fuseport.cli import main\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "main.add_command(click.Command('x', callback=lambda: os.kill(os.getpid(), 2)))\n"
        "main(['x'])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("limit", [2000, 6000])
def test_a_disk_that_is_full_in_the_middle_of_an_export(
    limit: int, command: Command, small_bundle: Small, tmp_path: Path
) -> None:
    """Fault 20. Files beyond a size cannot be written: torch's, too, whose writer would abort."""
    output = tmp_path / "out" / "b"
    run = command(*export_of(small_bundle, output), limit=limit)
    assert run.wait() == 7, run.said()
    assert run.said()[-1].startswith(f"fuseport: {output}: cannot be written: ")
    assert "File too large" in run.said()[-1]
    assert list(output.parent.iterdir()) == []
    assert left_in(tmp_path / "tmp") == []


def test_two_exports_to_one_path_leave_one_whole_bundle(
    command: Command, small_bundle: Small, tmp_path: Path
) -> None:
    """Fault 21."""
    output = tmp_path / "out" / "b"
    runs = {seed: command(*export_of(small_bundle, output), "--seed", seed) for seed in (1, 2)}
    codes = {seed: run.wait() for seed, run in runs.items()}
    assert sorted(codes.values()) == [0, 2]
    refused = next(run for seed, run in runs.items() if codes[seed])
    assert refused.said()[-1] == f"fuseport: {output}: a bundle is there; --force replaces it"
    bundle = open_bundle(output)
    assert codes[bundle.manifest["seed"]] == 0
    assert is_trusted(bundle.sha256)
    assert [path.name for path in output.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("inside", ["weights.safetensors", "."])
def test_an_export_does_not_replace_what_it_reads(
    inside: str, command: Command, small_bundle: Small
) -> None:
    """Fault 20: the output is the input, or holds it."""
    bundle, model = small_bundle
    options = ["--model", model, "--input-shapes", "x:[batch,6]", "--force"]
    before = hash_file(bundle / "manifest.json")
    run = command("export", bundle / inside, "-o", bundle, *options)
    assert run.wait() == 2
    assert "the checkpoint is in it" in run.said()[-1]
    assert hash_file(bundle / "manifest.json") == before
    open_bundle(bundle)


NET = """
import torch
from fuseport.ops.swiglu import swiglu

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(6, 4)
        self.up = torch.nn.Linear(6, 4)

    def forward(self, x):
        return swiglu(self.gate(x), self.up(x))
"""


def test_the_same_export_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """Fault 24. In processes whose hashes of strings differ: every file, the manifest too."""
    import torch

    (tmp_path / "net.py").write_text(NET)
    torch.manual_seed(0)
    linear = {"weight": torch.randn(4, 6), "bias": torch.randn(4)}
    state = {f"{name}.{key}": t for name in ("gate", "up") for key, t in linear.items()}
    torch.save(state, tmp_path / "net.pt")
    command = [sys.executable, "-m", "fuseport.cli", "export", tmp_path / "net.pt", "--model"]
    command += [f"{tmp_path / 'net.py'}:Net", "--input-shapes", "x:[batch,6]", "-o"]
    outputs = [tmp_path / str(seed) / "b" for seed in (1, 2)]
    runs = [
        subprocess.Popen(
            [*command, output],
            env={**os.environ, "PYTHONHASHSEED": output.parent.name},
            stdout=subprocess.DEVNULL,
        )
        for output in outputs
    ]
    assert [run.wait(timeout=500) for run in runs] == [0, 0]
    one, other = (
        {p.relative_to(b).as_posix(): hash_file(p) for p in sorted(b.rglob("*")) if p.is_file()}
        for b in outputs
    )
    assert {p.rpartition(".")[2] for p in one} >= {"pt", "pt2", "onnx", "safetensors", "so", "json"}
    assert one == other
