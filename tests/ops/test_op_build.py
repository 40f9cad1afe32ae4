"""Native libraries are built once, seen whole or not at all, and missed politely.

The compiler here is a script that writes what it is told into a log, and for a link copies the
real library, so that nothing compiles.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fuseport.ops import build, ort
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
        build.compiler_version.cache_clear()

    def links(self) -> int:
        return sum("-shared" in line for line in self.log.read_text().splitlines())


@pytest.fixture
def compiler(spec: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    library = build.library_path(spec)
    stand_in = Compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(stand_in.script))
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "cache"))
    build.compiler_version.cache_clear()
    return stand_in


def test_a_library_is_built_once(
    spec: OpSpec, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fuseport")
    assert build.cached(spec) is None
    assert build.status(spec).state == "buildable"
    path = build.library_path(spec)
    [said] = [record.message for record in caplog.records if "compiling" in record.message]
    assert said.startswith(f"compiling {spec.name}'s kernels")
    assert path.read_bytes() == compiler.library.read_bytes()
    assert build.status(spec) == build.Status("built", str(path))
    assert build.library_path(spec) == build.cached(spec) == path
    assert compiler.links() == 1
    assert sum("compiling" in record.message for record in caplog.records) == 1
    files = [p for p in path.parent.iterdir() if p.is_file()]
    assert sorted(p.suffix for p in files) == [".lock", ".so"]
    objects = [p.suffix for p in (path.parent / "objects").iterdir()]
    assert objects == [".o"] * (2 + len(build.VARIANTS))  # the binding, and autograd of all ops


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
    assert [p.suffix for p in build.cache_folder().rglob("*") if p.is_file()] == [".lock"]


@pytest.mark.parametrize(("variable", "others"), [("FUSEPORT_CACHE", 5), ("XDG_CACHE_HOME", 0)])
def test_a_cache_whose_place_is_chosen_serves_other_users(
    variable: str,
    others: int,
    spec: OpSpec,
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container's image, which root makes and somebody else runs."""
    monkeypatch.delenv("FUSEPORT_CACHE")
    monkeypatch.setenv(variable, str(tmp_path / "another"))
    usual = os.umask(0o022)
    try:
        path = build.library_path(spec)
    finally:
        os.umask(usual)
    assert path.parent.stat().st_mode & 0o007 == others
    assert path.stat().st_mode & 0o004


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


def test_a_source_that_does_not_go_into_a_library_does_not_rebuild_it(spec: OpSpec) -> None:
    for_torch, for_onnxruntime = build._for_torch(spec), ort._library([spec])
    names = set(build._sources(for_torch.units)), set(build._sources(for_onnxruntime.units))
    common = {"selective_scan/kernel.cpp", "selective_scan/forward.hpp", "native/vector.hpp"}
    assert common <= names[0] & names[1]
    assert {"selective_scan/torch.cpp", "native/parallel.hpp"} <= names[0] - names[1]
    assert {"selective_scan/ort.cpp", "native/ort.cpp", "native/ort.hpp"} <= names[1] - names[0]


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with headers of ONNX Runtime, as far as looking for them tells."""
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "onnxruntime_c_api.h").touch()
    monkeypatch.setenv(ort.HEADERS, str(folder))
    return folder


class TestForOnnxRuntime:
    def test_it_is_built_once_from_the_headers_that_are_found(
        self, spec: OpSpec, compiler: Compiler, headers: Path
    ) -> None:
        assert ort.status([spec]).state == "buildable"
        path = ort.library([spec])
        assert ort.status([spec]) == build.Status("built", str(path))
        assert ort.library([spec]) == path
        assert compiler.links() == 1
        compiled = [line for line in compiler.log.read_text().splitlines() if " -c " in line]
        bindings = [line for line in compiled if "ort.cpp" in line]
        assert len(bindings) == 2
        assert all(f"-I{headers}" in line for line in bindings)
        assert not any("torch" in line.replace("no-trapping", "") for line in compiled)

    def test_kernels_are_compiled_once_for_both_libraries(
        self, spec: OpSpec, compiler: Compiler, headers: Path
    ) -> None:
        build.library_path(spec)
        ort.library([spec])
        compiled = [line for line in compiler.log.read_text().splitlines() if " -c " in line]
        assert sum("kernel.cpp" in line for line in compiled) == len(build.VARIANTS)
        assert compiler.links() == 2

    def test_an_op_without_a_binding_has_no_part_in_it(self, spec: OpSpec) -> None:
        other = replace(spec, name="other", package="fuseport.ops")
        assert ort._library([other]).units == ort._library([]).units
        assert ort._library([spec, other]).units == ort._library([spec]).units

    def test_once_built_it_needs_no_headers(
        self, spec: OpSpec, compiler: Compiler, headers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = ort.library([spec])
        monkeypatch.setenv(ort.HEADERS, "nowhere")
        assert ort.library([spec]) == path

    def test_without_headers_it_says_how_to_get_them(
        self, spec: OpSpec, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(ort.HEADERS, raising=False)
        monkeypatch.setattr(ort, "_folders", lambda: iter([tmp_path]))
        with pytest.raises(build.BuildError, match="apt install libonnxruntime-dev") as caught:
            ort.library([spec])
        assert ort.HEADERS in str(caught.value)
        assert "onnxruntime-linux-x64" in str(caught.value)
        assert ort.status([spec]) == build.Status("unavailable", str(caught.value))

    def test_without_a_compiler_it_says_so(
        self, spec: OpSpec, compiler: Compiler, headers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert "no-such-compiler" in ort.status([spec]).detail
        with pytest.raises(build.BuildError, match="no-such-compiler"):
            ort.library([spec])

    def test_who_wants_no_native_code_gets_none(
        self, spec: OpSpec, compiler: Compiler, headers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FUSEPORT_NATIVE", "0")
        assert ort.status([spec]).state == "unavailable"
        with pytest.raises(build.BuildError, match="FUSEPORT_NATIVE=0"):
            ort.library([spec])


class TestHeaders:
    def test_a_folder_that_is_named_is_the_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ort.HEADERS, str(tmp_path))
        with pytest.raises(build.BuildError, match=f"{ort.HEADERS} names .*no onnxruntime_c_api.h"):
            ort.headers()
        (tmp_path / "onnxruntime_c_api.h").touch()
        assert ort.headers() == tmp_path.resolve()

    def test_the_environments_own_are_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(ort.HEADERS, raising=False)
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        folder = tmp_path / "include/onnxruntime"
        folder.mkdir(parents=True)
        (folder / "onnxruntime_c_api.h").touch()
        assert ort.headers() == folder

    def test_those_that_pkg_config_knows_are_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = tmp_path / "pkg-config"
        program.write_text(f"#!/bin/sh\necho '-I{tmp_path}/h -I/elsewhere'\n")
        program.chmod(0o755)
        (tmp_path / "h").mkdir()
        (tmp_path / "h/onnxruntime_c_api.h").touch()
        monkeypatch.delenv(ort.HEADERS, raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        assert ort.headers() == tmp_path / "h"


def test_a_users_own_op_may_include_its_folder_and_what_ops_share(
    spec: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "users_own_op"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernel.hpp").write_text("#pragma once\n")
    includes = ("native/isa.hpp", "users_own_op/kernel.hpp")
    (folder / "torch.cpp").write_text("".join(f'#include "{name}"\n' for name in includes))
    monkeypatch.syspath_prepend(tmp_path)
    own = replace(spec, name="users_own_op", package="users_own_op")
    library = build._for_torch(own)
    assert own.has("torch.cpp")
    assert [unit.source for unit in library.units] == [folder / "torch.cpp"]
    found = build._sources(library.units)
    assert {"users_own_op/torch.cpp", *includes} <= set(found)
    (folder / "kernel.hpp").write_text("#pragma once\nint other;\n")
    assert build._sources(library.units) != found
