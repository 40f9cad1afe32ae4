"""Every bad checkpoint is refused, with its code and one line, and every good one is read rightly.

Faults 1 to 9, and of 10 to 12 what is read. Files are made by `corpus/`, and read in children of
one process that has imported all before: what a child takes is what the reading takes.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fuseport.exporter.bundle import staged
from fuseport.tests.corpus.benign import BENIGN, Benign
from fuseport.tests.corpus.hostile import HOSTILE, Hostile
from fuseport.tests.corpus.hostile_files import HOSTILE_ARTIFACTS, HOSTILE_FILES
from fuseport.tests.corpus.judge import hashes

CHECKPOINTS = (*HOSTILE, *HOSTILE_FILES)
# Of processor time, for a refusal; code whose branches are counted takes several times as long.
SECONDS = 20.0 if os.environ.get("COVERAGE_RUN") else 5.0
MEMORY = 256 * 2**20  # over the file's size
# Through a process of its own, one of each kind.
SAMPLE = ("code in w.ckpt, zip", "a flipped bit in w/data.pkl", "a shard with code")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every file of the corpus by name; beside each, a bundle that it must not change."""
    return {
        bad.name: _make(bad, tmp_path_factory.mktemp("bad"))
        for bad in (*CHECKPOINTS, *HOSTILE_ARTIFACTS)
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Mapping[str, Any]]]:
    return {one.name: one.make(tmp_path_factory.mktemp("good")) for one in BENIGN}


@pytest.fixture(scope="module")
def answers(
    made: dict[str, Path], good: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What came of every file: of checkpoints from `fuseport export`."""
    names = [*(bad.name for bad in CHECKPOINTS)]
    asked = [{"reader": "command", "path": str(made[name])} for name in names]
    asked += [{"reader": "artifact", "path": str(made[bad.name])} for bad in HOSTILE_ARTIFACTS]
    asked += [{"reader": "load", "path": str(good[one.name][0])} for one in BENIGN]
    names += [one.name for one in (*HOSTILE_ARTIFACTS, *BENIGN)]
    # Two processes, of which each has every second file: what takes long is spread over both.
    halves = [range(first, len(asked), 2) for first in range(2)]
    running = []
    for half in halves:
        file = tmp_path_factory.mktemp("asked") / "asked.json"
        file.write_text(json.dumps([asked[i] for i in half]))
        command = [sys.executable, "-m", "fuseport.tests.corpus.judge", str(file)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    found: dict[str, dict[str, Any]] = {}
    for half, judge in zip(halves, running, strict=True):
        printed, _ = judge.communicate(timeout=500)
        assert judge.returncode == 0
        given = json.loads(printed.splitlines()[-1])
        found |= dict(zip((names[i] for i in half), given, strict=True))
    return found


def test_the_corpus_is_large_enough_and_its_names_are_its_own() -> None:
    names = [one.name for one in (*CHECKPOINTS, *HOSTILE_ARTIFACTS, *BENIGN)]
    assert len(set(names)) == len(names)
    assert len(CHECKPOINTS) >= 60
    assert len(BENIGN) >= 50
    assert {bad.fault for bad in (*CHECKPOINTS, *HOSTILE_ARTIFACTS)} == set(range(1, 13))


@pytest.mark.parametrize("bad", CHECKPOINTS, ids=lambda bad: f"fault {bad.fault}: {bad.name}")
def test_a_bad_checkpoint_is_refused(
    bad: Hostile, made: dict[str, Path], answers: dict[str, dict[str, Any]]
) -> None:
    """Faults 1 to 9. The command ends as it is to, says why, runs nothing and changes nothing."""
    answer, path = answers[bad.name], made[bad.name]
    assert answer["died"] is None
    assert answer["result"]["code"] == bad.code, answer["result"]["message"]
    _is_one_line(answer["result"]["lines"], bad, path)
    _is_frugal(answer, path)
    _nothing_happened(path)


@pytest.mark.parametrize("bad", HOSTILE_ARTIFACTS, ids=lambda bad: f"fault {bad.fault}: {bad.name}")
def test_a_bad_artifact_is_refused(
    bad: Hostile, made: dict[str, Path], answers: dict[str, dict[str, Any]]
) -> None:
    """Faults 10 to 12, and 8 in a `.pt2`, as far as files are read."""
    answer, path = answers[bad.name], made[bad.name]
    assert answer["died"] is None
    assert answer["result"]["code"] == bad.code, answer["result"]["message"]
    _is_one_line([answer["result"]["message"]], bad, path)
    _is_frugal(answer, path)


@pytest.mark.parametrize("one", BENIGN, ids=lambda one: one.name)
def test_a_good_checkpoint_is_read(
    one: Benign, good: dict[str, Any], answers: dict[str, dict[str, Any]]
) -> None:
    """Bit by bit; fault 4: what names code among settings is data."""
    answer = answers[one.name]
    assert answer["died"] is None
    assert answer["result"]["code"] == 0, answer["result"]["message"]
    assert answer["result"]["tensors"] == hashes(good[one.name][1])
    if one.config is not None:
        assert answer["result"]["config"] == one.config


@pytest.mark.parametrize("name", SAMPLE)
def test_the_command_itself_refuses(name: str, tmp_path: Path) -> None:
    """Faults 1, 5 and 6, in a process of their own."""
    bad = next(bad for bad in CHECKPOINTS if bad.name == name)
    path = _make(bad, tmp_path)
    command = [sys.executable, "-m", "fuseport.cli", "export", str(path), "--force", "-o"]
    done = subprocess.run([*command, str(tmp_path / "bundle")], capture_output=True, text=True)
    assert done.returncode == bad.code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fuseport:")]
    _is_one_line(lines, bad, path)
    _nothing_happened(path)


def _make(bad: Hostile, folder: Path) -> Path:
    with staged(folder / "bundle", force=False) as (inside, _):
        (inside / "weights.safetensors").write_bytes(b"old")
    path = bad.make(folder)
    names = sorted(p.name for p in folder.iterdir())
    (folder / "before.json").write_text(json.dumps([names, _hash(folder / "bundle")]))
    return path


def _hash(folder: Path) -> str:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    content = b"".join(str(p.relative_to(folder)).encode() + p.read_bytes() for p in files)
    return hashlib.sha256(content).hexdigest()


def _is_one_line(lines: Iterable[str], bad: Hostile, path: Path) -> None:
    (line,) = lines
    assert line.isprintable()
    assert bad.says in line
    assert str(path.parent)[:60] in line, "it names the file"
    assert len(line) < 2000 + len(str(path))


def _is_frugal(answer: dict[str, Any], path: Path) -> None:
    files = [path] if path.is_file() else list(path.iterdir())
    assert answer["cpu"] < SECONDS
    assert answer["memory"] < MEMORY + sum(os.path.getsize(file) for file in files)


def _nothing_happened(path: Path) -> None:
    folder = path.parent
    names, hash_ = json.loads((folder / "before.json").read_text())
    there = sorted(p.name for p in folder.iterdir() if p.name != "before.json")
    assert there == names, "no canary, no partial output"
    assert _hash(folder / "bundle") == hash_
