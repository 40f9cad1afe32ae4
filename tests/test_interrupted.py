"""Signals at many moments of real commands, and what real exports leave or give.

`FUSEPORT_MOMENTS=40` tries so many moments of each; `make faults` does.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fuseport.exporter.bundle import hash_file, open_bundle
from fuseport.exporter.trust import is_trusted

MOMENTS = int(os.environ.get("FUSEPORT_MOMENTS", "2"))
FIXTURES = Path(__file__).parent.parent / "fixtures"
Small = tuple[Path, str]
Command = Callable[..., "subprocess.Popen[str]"]
MARK = "FUSEPORT_TEST_MARK"


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Starts fuseport with a temporary folder of its own, `tmp_path / "tmp"`."""
    (tmp_path / "tmp").mkdir()

    def default_handlers() -> None:
        # What a shell runs in the background ignores SIGINT, and so would its children.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def start(*arguments: object, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "fuseport.cli", *map(str, arguments)],
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=default_handlers,
        )

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
    """Fault 21. A moment is a line of progress and a time after it, drawn with a seed."""
    output = tmp_path / "out" / "b"
    output.parent.mkdir()
    bundle, model = small_bundle
    arguments = {
        "export": export_of(small_bundle, output),
        "verify": ["verify", bundle, "--model", model, "--runtime", "onnxruntime"],
    }[what]
    begin = time.monotonic()
    with command(*arguments) as run:
        lines = run.communicate()[1].splitlines()
    seconds = time.monotonic() - begin
    assert run.returncode == 0
    assert len(lines) >= 4
    before = list(output.parent.iterdir())
    generator = random.Random(0)
    for moment in range(MOMENTS):
        number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
        after = generator.randrange(1, len(lines))
        mark = str(uuid.uuid4())
        force = ["--force"] if what == "export" else []
        with command(*arguments, *force, **{MARK: mark}) as run:
            assert run.stderr is not None
            for _ in range(after):
                run.stderr.readline()
            time.sleep(generator.uniform(0, seconds / len(lines)))
            run.send_signal(number)
            rest = run.communicate(timeout=300)[1]
        said = f"{what}, {number.name} after line {after}: {rest}"
        assert run.returncode in (128 + number, 0), said
        if run.returncode:
            assert rest.splitlines()[-1] == "fuseport: interrupted", said
        assert running(mark) == [], said
        assert left_in(tmp_path / "tmp") == [], said
        assert list(output.parent.iterdir()) == before, said
        if what == "export":
            open_bundle(output)


def test_a_signal_before_the_command_has_begun_is_no_verdict(command: Command) -> None:
    """Fault 21: Python, or click, would end with 1, which means a mismatch."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with command("doctor") as run:
            time.sleep(0.02)
            run.send_signal(number)
            run.communicate(timeout=100)
        # Before there is a handler, the signal itself ends the process: 130 or 143 to a shell.
        assert run.returncode in (-number, 128 + number)


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As in what a shell without job control runs in the background."""
    code = (
        "import os, signal, click; from fuseport.cli import main\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "main.add_command(click.Command('x', callback=lambda: os.kill(os.getpid(), 2)))\n"
        "main(['x'])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("limit", [700, 3000])
def test_a_disk_that_is_full_in_the_middle_of_an_export(
    limit: int, command: Command, small_bundle: Small, tmp_path: Path
) -> None:
    """Fault 20. Of some size, files of each writer cannot be written whole: torch's, too."""
    output = tmp_path / "out" / "b"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        run = command(*export_of(small_bundle, output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with run:
        error = run.communicate(timeout=300)[1]
    assert run.returncode == 7, error
    last = error.splitlines()[-1]
    assert last.startswith(f"fuseport: {output}: cannot be written: File too large")
    assert list(output.parent.iterdir()) == []
    assert left_in(tmp_path / "tmp") == []


def test_two_exports_to_one_path_leave_one_whole_bundle(
    command: Command, small_bundle: Small, tmp_path: Path
) -> None:
    """Fault 21."""
    output = tmp_path / "out" / "b"
    runs = [command(*export_of(small_bundle, output), "--seed", seed) for seed in (1, 2)]
    errors = [run.communicate(timeout=300)[1] for run in runs]
    refused = [e.splitlines()[-1] for run, e in zip(runs, errors, strict=True) if run.returncode]
    assert [run.returncode for run in runs if run.returncode] in ([], [2]), errors
    assert refused == [f"fuseport: {output}: a bundle is there; --force replaces it"]
    seed = next(seed for seed, run in zip((1, 2), runs, strict=True) if run.returncode == 0)
    bundle = open_bundle(output)
    assert bundle.manifest["seed"] == seed
    assert is_trusted(bundle.sha256)
    assert [path.name for path in output.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("inside", ["weights.safetensors", "."])
def test_an_export_does_not_replace_what_it_reads(
    inside: str, command: Command, small_bundle: Small, tmp_path: Path
) -> None:
    """Fault 20: the output is the input, or holds it."""
    bundle, model = small_bundle
    options = ["--model", model, "--input-shapes", "x:[batch,6]", "--force"]
    before = hash_file(bundle / "manifest.json")
    with command("export", bundle / inside, "-o", bundle, *options) as run:
        error = run.communicate(timeout=300)[1]
    assert run.returncode == 2
    assert "the checkpoint is in it" in error.splitlines()[-1]
    assert hash_file(bundle / "manifest.json") == before
    open_bundle(bundle)


def test_the_same_export_twice_gives_the_same_bytes(command: Command, tmp_path: Path) -> None:
    """Fault 24. In two processes whose hashes of strings differ: every file, the manifest too."""
    checkpoint = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    outputs = [tmp_path / str(seed) / "b" for seed in (1, 2)]
    for seed, output in enumerate(outputs, 1):
        with command("export", checkpoint, "-o", output, PYTHONHASHSEED=str(seed)) as run:
            assert run.wait(timeout=500) == 0
    one, other = (
        {p.relative_to(b).as_posix(): hash_file(p) for p in sorted(b.rglob("*")) if p.is_file()}
        for b in outputs
    )
    assert {p.rpartition(".")[2] for p in one} >= {"pt", "pt2", "onnx", "safetensors", "so", "json"}
    assert one == other
