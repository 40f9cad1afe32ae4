"""Native libraries are built once, seen whole or not at all, and missed politely.

The compiler here is a script that writes what it is told into a log, and for a link copies the
real library, so that nothing compiles.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fuseport.ops import build
from fuseport.ops.spec import OpSpec

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Compiler:
    """A stand-in for a C++ compiler: `version` is what it says, `fails` whether it does."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.log = folder / "log"
        self.script = folder / "c++"
        self.library = library
        self.log.touch()
        self.be("1.0")

    def be(self, version: str, fails: bool = False) -> None:
        self.script.write_text(
            # Not Python's own path after #!, which must not hold a space.
            f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''\n"
            "import shutil, sys, time\n"
            "arguments = sys.argv[1:]\n"
            f"if arguments == ['--version']:\n    sys.exit(print({version!r}))\n"
            f"open({str(self.log)!r}, 'a').write(' '.join(arguments) + '\\n')\n"
            f"if {fails}:\n    sys.exit('kernel.cpp:1: error: no')\n"
            "target = arguments[arguments.index('-o') + 1]\n"
            "open(target, 'w').close()\n"
            "time.sleep(0.05)\n"
            f"if '-shared' in arguments:\n    shutil.copy({str(self.library)!r}, target)\n"
        )
        self.script.chmod(0o755)
        build._version.cache_clear()

    def links(self) -> int:
        return sum("-shared" in line for line in self.log.read_text().splitlines())


@pytest.fixture
def compiler(spec: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    library = build.library_path(spec)
    stand_in = Compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(stand_in.script))
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "cache"))
    build._version.cache_clear()
    return stand_in


def test_a_library_is_built_once(spec: OpSpec, compiler: Compiler) -> None:
    assert build.cached(spec) is None
    assert build.status(spec).state == "buildable"
    path = build.library_path(spec)
    assert path.read_bytes() == compiler.library.read_bytes()
    assert build.status(spec) == build.Status("built", str(path))
    assert build.library_path(spec) == build.cached(spec) == path
    assert compiler.links() == 1
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".so"]


def test_another_compiler_another_library(spec: OpSpec, compiler: Compiler) -> None:
    first = build.library_path(spec)
    compiler.be("2.0")
    assert build.cached(spec) is None
    assert build.library_path(spec) != first


def test_without_a_compiler_any_library_of_the_same_sources_is_right(
    spec: OpSpec, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.library_path(spec)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.cached(spec) == path


def test_many_at_once_build_once(spec: OpSpec, compiler: Compiler) -> None:
    threads = [threading.Thread(target=build.library_path, args=(spec,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.links() == 1


def test_a_failed_build_leaves_nothing_and_says_why(spec: OpSpec, compiler: Compiler) -> None:
    compiler.be("1.0", fails=True)
    with pytest.raises(build.BuildError, match=r"exit 1.*kernel.cpp:1: error: no") as caught:
        build.library_path(spec)
    assert "\n" not in str(caught.value)
    assert [p.suffix for p in build.cache_folder().iterdir()] == [".lock"]


def test_an_unwritable_cache_is_a_build_error(
    spec: OpSpec, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(build.BuildError, match="cannot write to"):
        build.library_path(spec)


USE = """
import torch
from fuseport.ops import OPS, registration
from fuseport.ops.selective_scan import selective_scan
x = torch.ones(1, 1, 3)
for _ in range(2):
    selective_scan(x, x, -torch.ones(1, 1), torch.ones(1, 1, 3), torch.ones(1, 1, 3))
print(registration.implementation(OPS["selective_scan"]))
"""


def test_without_a_compiler_the_reference_runs_and_one_line_says_so(
    run_python: Run, tmp_path: Path
) -> None:
    done = run_python(USE, FUSEPORT_CACHE=str(tmp_path), CXX=None, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "reference"
    assert len(done.stderr.splitlines()) == 1
    assert "there is no C++ compiler: install g++" in done.stderr


def test_a_library_that_does_not_load_is_said_too(
    spec: OpSpec, compiler: Compiler, run_python: Run
) -> None:
    build.library_path(spec).write_bytes(b"not a library")
    done = run_python(USE)
    assert done.stdout.strip() == "reference"
    assert len(done.stderr.splitlines()) == 1
    assert "cannot load" in done.stderr


def test_the_reference_on_request_is_silent(run_python: Run) -> None:
    done = run_python(USE, FUSEPORT_NATIVE="0")
    assert done.stdout.strip() == "reference"
    assert done.stderr == ""


def test_the_library_needs_no_python(spec: OpSpec) -> None:
    needed = subprocess.run(
        ["readelf", "-d", str(build.library_path(spec))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    libraries = [line for line in needed.splitlines() if "NEEDED" in line]
    assert any("libtorch_cpu" in line for line in libraries)
    assert not any("python" in line or "gomp" in line for line in libraries)
